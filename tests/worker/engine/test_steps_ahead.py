"""The next step is submitted while one computes [V1]: the same tokens, and no block changes its
owner before its step has ended.

The runner computes a batch as late as it can, so whatever is taken too early is seen.
"""

import pytest

from pdcluster_worker.engine.prefill_delayer import OwnBoard, PrefillDelayer
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import (
    SCHEDULER_NAMES,
    DelayerSettings,
    SchedulerSettings,
)

PROMPT = list(range(10))


@pytest.fixture
def ahead(engine):
    """Builds an engine that submits a step while another computes; sizes by keyword."""
    return lambda **sizes: engine(depth=2, **sizes)


def watch(rig):
    """Calls of the runner from now on, in order."""
    requested = []
    prepare, wait = rig.runner.prepare, rig.runner.wait
    rig.runner.prepare = lambda batch: (
        requested.append([(item.request.request_id, item.start) for item in batch.items]),
        prepare(batch),
    )[1]
    rig.runner.wait = lambda step: (requested.append("wait"), wait(step))[1]
    return requested


def test_step_is_submitted_while_the_one_before_computes_v1(ahead, spec):
    """By position: the token at 11 is not known when its step is submitted.

    A length is known ahead, so no step is too many.
    """
    rig = ahead()
    requested = watch(rig)
    rig.handle(m.Submit(spec("a", PROMPT, max_tokens=4)))
    assert rig.tokens("a") == []
    rig.run()
    assert requested == [
        [("a", 0)],
        [("a", 10)],
        "wait",
        [("a", 11)],
        "wait",
        [("a", 12)],
        "wait",
        "wait",
    ]
    assert rig.token_ids("a") == rig.runner.reference(PROMPT, 4)
    assert rig.tokens("a")[-1].finish_reason == "length"


def test_stop_token_costs_a_step_whose_output_is_dropped(ahead, engine, spec):
    expected = engine().runner.reference(PROMPT, 9)
    rig = ahead()
    rig.handle(m.Submit(spec("a", PROMPT, max_tokens=9, eos_token_ids=[expected[2]])))
    while not rig.tokens("a") or rig.tokens("a")[-1].finish_reason is None:
        rig.step()
    assert rig.core.has_work  # the step too many
    assert rig.blocks["in_use"] == 4  # it writes the last of them
    assert rig.runner.forgotten == []
    rig.run()
    assert rig.token_ids("a") == expected[:3]
    assert set(rig.blocks) == {"free", "cached"}
    assert rig.runner.forgotten == ["a"]
    assert rig.stats.generation_tokens == 3


def test_only_known_tokens_are_hashed_and_as_many_as_without(ahead, engine, spec):
    hashes = []
    for build in (engine, ahead):
        rig = build()
        rig.serve(spec("a", PROMPT, max_tokens=8))
        hashes.append({stored for events in rig.of(m.BlockEvents) for stored in events.stored})
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 4  # 10 + 8 - 1 computed tokens


def test_blocks_of_an_aborted_request_are_no_peers_before_its_step_has_ended(ahead, spec):
    """Else the step under way would write into what a peer has written."""
    rig = ahead(num_blocks=4, prefix_caching=False)
    rig.handle(m.Submit(spec("a", PROMPT, max_tokens=6)))
    rig.core.handle(m.Abort("a"))
    rig.core.handle(m.Receive(spec("b", range(50, 60))))
    rig.step()
    (refused,) = rig.of(m.ReceiveRefused)
    assert refused.request_id == "b"
    assert rig.blocks == {"free": 4}
    rig.handle(m.Receive(spec("b", range(50, 60))))
    assert rig.of(m.ReceiveReady)
    assert rig.tokens("a") == []


def test_blocks_of_a_stopped_request_are_no_peers_before_its_last_step_has_ended(
    ahead, engine, spec
):
    rig = ahead(num_blocks=4, prefix_caching=False)
    (first,) = engine().runner.reference(PROMPT, 1)
    rig.handle(m.Submit(spec("a", PROMPT, max_tokens=6, eos_token_ids=[first])))
    rig.step()
    assert rig.tokens("a")[-1].finish_reason == "stop"
    rig.core.handle(m.Receive(spec("b", range(50, 60))))
    rig.step()
    assert rig.of(m.ReceiveRefused)
    assert rig.blocks == {"free": 4}


def test_id_of_an_aborted_request_may_be_used_again_in_the_middle_of_its_step(ahead, spec):
    rig = ahead()
    rig.handle(m.Submit(spec("a", PROMPT, max_tokens=6)))
    rig.core.handle(m.Abort("a"))
    rig.core.handle(m.Submit(spec("a", [7, 8, 9], max_tokens=3)))
    rig.run()
    assert rig.token_ids("a") == rig.runner.reference([7, 8, 9], 3)


@pytest.mark.parametrize("name", SCHEDULER_NAMES)
def test_every_scheduler_makes_the_same_tokens_where_blocks_run_out(ahead, spec, name):
    """A request that would lose blocks is in no step then: the one under way is
    waited for first.
    """
    own = SchedulerSettings(name=name)
    rig = ahead(num_blocks=7, max_batched_tokens=100, prefix_caching=False, scheduler=own)
    prompts = {"a": list(range(8)), "b": list(range(20, 28)), "c": list(range(40, 47))}
    for request_id, prompt in prompts.items():
        rig.core.handle(m.Submit(spec(request_id, prompt, max_tokens=9)))
    rig.run()
    rig.check(prompts, 9)
    assert (rig.stats.preemptions > 0) == (name not in ("orca", "request-level"))


def test_steps_overlap_again_after_a_failed_one(ahead, spec):
    rig = ahead()
    rig.handle(*(m.Submit(spec(name, [ord(name[0])], max_tokens=8)) for name in ("a", "bad")))
    rig.runner.failing = {"bad": ValueError("no such position")}
    while not rig.of(m.RequestFailed):
        rig.step()
    for _ in range(2):
        rig.step()
        assert len(rig.core._in_flight) == 1  # of two: one was waited for
    rig.run()
    assert rig.token_ids("a") == rig.runner.reference([ord("a")], 8)


def test_prefill_for_a_peer_is_in_no_step_after_its_last_chunk(pair, spec):
    both = pair(prefill={"depth": 2, "max_batched_tokens": 4}, decode={"depth": 2})
    both.start(spec("a", PROMPT, max_tokens=4))
    both.finish()
    assert both.prefill.runner.executed == [[("a", 4)], [("a", 4)], [("a", 2)]]
    both.check(PROMPT, 4)


def test_held_back_prompts_come_out_right(ahead, spec):
    delayer = PrefillDelayer(DelayerSettings(max_delay_passes=3, queue_min_ratio=1.0), OwnBoard())
    rig = ahead(delayer=delayer)
    prompts = {"a": PROMPT, "b": [1, 2], "c": [3, 4, 5]}
    for name, prompt in prompts.items():
        rig.handle(m.Submit(spec(name, prompt, max_tokens=6)))
    for _ in range(60):
        rig.step()
    rig.check(prompts, 6)


def test_steps_that_overlap_share_no_second(ahead, spec):
    rig = ahead()
    rig.runner.on_execute = lambda: rig.clock.advance(1.0)
    rig.serve(spec("a", PROMPT, max_tokens=3))
    assert (rig.stats.num_steps, rig.stats.busy_seconds, rig.stats.overhead_seconds) == (
        3,
        3.0,
        0.0,
    )
