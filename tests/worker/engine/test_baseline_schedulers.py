"""The baselines of [A5], written out: each batch as the runner was given it."""

import pytest

from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.scheduler.policies import SCHEDULERS, make_scheduler
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import EngineSettings, SchedulerSettings
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams


@pytest.fixture
def rig_of(engine):
    """Builds a rig with the named scheduler."""

    def build(name, **sizes):
        values = {"num_blocks": 64, "max_batched_tokens": 100} | sizes
        return engine(scheduler=SchedulerSettings(name=name), **values)

    return build


def ask(rig, spec, **prompts):
    """Submit `name=(prompt tokens, output tokens)` in order of arrival, and take one step."""
    for name, (num_prompt, num_output) in prompts.items():
        rig.core.handle(m.Submit(spec(name, [ord(name)] * num_prompt, max_tokens=num_output)))
        rig.clock.advance(1)
    rig.step()


def executed(rig):
    """Steps as "a2 b30, a1", each with its requests and their tokens."""
    return ", ".join(
        " ".join(f"{name}{count}" for name, count in batch) for batch in rig.runner.executed
    )


FIRST, LATER = {"a": (2, 4)}, {"b": (30, 2), "c": (40, 2)}


@pytest.mark.parametrize(
    ("name", "sizes", "arrivals", "expected"),
    [
        # whole prompts, for which decodes wait; one that does not fit comes in the next step
        ("prefill-first", {}, [FIRST, LATER], "a2, b30 c40, a1 b1 c1, a1, a1"),
        ("prefill-first", {}, [{"a": (2, 2)}, {"b": (60, 1), "c": (50, 1)}], "a2, b60, c50, a1"),
        # decodes and whole prompts
        ("orca", {}, [FIRST, LATER], "a2, a1 b30 c40, a1 b1 c1, a1"),
        # c waits for b, the longer of the first two, though a's seat is empty by then
        (
            "request-level",
            {"max_sequences": 2},
            [{"a": (30, 2), "b": (40, 3), "c": (20, 1)}],
            "a30 b40, a1 b1, b1, c20",
        ),
        # chunks and decodes in turns; a turn without work falls to the other
        (
            "simple-chunking",
            {"max_batched_tokens": 8},
            [FIRST, {"b": (12, 2)}],
            "a2, a1, b8, a1, b4, a1 b1",
        ),
        ("simple-chunking", {"max_batched_tokens": 8}, [{"b": (20, 3)}], "b8, b8, b4, b1, b1"),
    ],
)
def test_a5_steps_of_each_are_those_of_its_system(rig_of, spec, name, sizes, arrivals, expected):
    rig = rig_of(name, **sizes)
    for prompts in arrivals:
        ask(rig, spec, **prompts)
    rig.run()
    assert executed(rig) == expected


def test_a5_prefill_first_admits_above_a_watermark(rig_of, spec):
    """10 blocks, a holds 5 and will grow: b's 5 would be all that is left."""
    rig = rig_of("prefill-first", num_blocks=10, max_batched_tokens=100)
    ask(rig, spec, a=(18, 2))
    ask(rig, spec, b=(20, 1))
    assert rig.runner.executed[1] == [("a", 1)]
    rig.run()
    assert rig.runner.executed[2] == [("b", 20)]


@pytest.mark.parametrize("name", ["orca", "request-level"])
def test_a5_maximum_length_is_reserved_at_admission(rig_of, spec, name):
    """a takes 2 + 38 tokens' blocks, so b's 28 find no room; nothing is ever preempted."""
    rig = rig_of(name, num_blocks=16)
    ask(rig, spec, a=(2, 38), b=(20, 8))
    assert rig.blocks == {"free": 6, "in_use": 10}
    rig.run()
    assert rig.stats.preemptions == 0
    assert rig.token_ids("b") == rig.runner.reference([ord("b")] * 20, 8)


@pytest.mark.parametrize("name", ["orca", "request-level"])
def test_a5_maximum_length_is_what_the_pool_can_hold_at_most(rig_of, spec, name):
    """max_tokens is often 'whatever fits': such a request runs, alone."""
    rig = rig_of(name, num_blocks=8)
    ask(rig, spec, a=(4, 90))
    assert rig.blocks == {"in_use": 8}
    rig.run()
    assert len(rig.token_ids("a")) == 29
    assert rig.of(m.RequestFailed)[0].message.startswith("33 tokens do not fit")


@pytest.mark.parametrize("name", ["orca", "request-level"])
def test_a5_maximum_length_is_held_from_the_start_of_a_transfer(pair, spec, name):
    """The decode side takes 5 + 20 tokens' blocks; the peer writes those of its 5."""
    own = SchedulerSettings(name=name)
    both = pair(decode={"scheduler": own, "max_batched_tokens": 100})
    ready = both.start(spec("a", [1, 2, 3, 4, 5], max_tokens=20))
    assert len(ready.block_ids) == 2
    assert both.decode.blocks == {"free": 9, "in_use": 5, "receiving": 2}


@pytest.mark.parametrize("name", ["orca", "request-level"])
def test_a5_a_prefill_for_a_peer_reserves_its_prompt_only(pair, spec, name):
    own = SchedulerSettings(name=name)
    both = pair(prefill={"scheduler": own, "max_batched_tokens": 100})
    both.prefill.transport.holding = True
    both.start(spec("a", [1, 2, 3, 4, 5], max_tokens=50))
    assert both.prefill.blocks["in_use"] == 2


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_received_kv_is_decoded_and_sent_kv_is_sent_by_each(pair, spec, name):
    """P/D: the same scheduler on both sides; the tokens are those of one engine."""
    sizes = {"scheduler": SchedulerSettings(name=name), "max_batched_tokens": 100}
    both = pair(decode=sizes, prefill=sizes)
    request = spec("a", list(range(10)), max_tokens=4)
    both.start(request)
    both.finish()
    both.check(range(10), 4)
    assert [count for batch in both.decode.runner.executed for _, count in batch] == [1, 1, 1]


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_nothing_new_is_admitted_unless_requested(name):
    """`admit=False`: what runs goes on, what waits waits."""
    scheduler, _ = scheduler_of(name)
    waiting = request_of("a")
    scheduler.add(waiting)
    assert not scheduler.schedule(admit=False).progressed
    step = scheduler.schedule()
    assert list(step.items) == [waiting]


def scheduler_of(name, **values):
    sizes = {"block_size": 4, "num_blocks": 16, "max_batched_tokens": 100}
    sizes |= {"max_sequences": 4, "max_model_len": 100}
    settings = EngineSettings(scheduler=SchedulerSettings(name=name, **values), **sizes)
    tables = BlockTables(settings, BlockPool(16))
    return make_scheduler(settings, tables), tables


def request_of(name, num_prompt=5):
    spec = RequestSpec(name, [ord(name)] * num_prompt, SamplingParams(max_tokens=9, seed=0))
    return EngineRequest.from_spec(spec, 0.0)


def test_an_unknown_scheduler_is_refused_with_the_names():
    with pytest.raises(ConfigError) as caught:
        scheduler_of("fastest")
    assert str(caught.value) == (
        "engine.scheduler: 'fastest' is no scheduler: use one of continuous, sarathi, "
        "prefill-first, orca, request-level, simple-chunking"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"name": "orca"},
            "scheduler orca computes a prompt in one step, and maxBatchedTokens (32) is below the "
            "longest request of 100 tokens: raise maxBatchedTokens, or set maxModelLen to at most "
            "that",
        ),
        ({"name": "prefill-first"}, "scheduler prefill-first computes a prompt in one step"),
        ({"name": "request-level"}, "scheduler request-level computes a prompt in one step"),
        ({"chunked_prefill": False}, "chunkedPrefill: false computes a prompt in one step"),
        (
            {"long_prefill_token_threshold": 101},
            "longPrefillTokenThreshold (101) is above the longest request of 100 tokens",
        ),
    ],
)
def test_v9_sizes_that_a_scheduler_cannot_work_with_are_refused(engine, values, message):
    own = SchedulerSettings(**values)
    with pytest.raises(ConfigError) as caught:
        engine(scheduler=own)
    assert message in str(caught.value)


def test_v3_the_threshold_caps_a_chunk_while_others_want_some_too(engine, spec):
    """Budget 16, threshold 4, four prompts: 4 each, not 16 for the first."""
    own = SchedulerSettings(long_prefill_token_threshold=4)
    rig = engine(scheduler=own, max_batched_tokens=16, num_blocks=64)
    rig.handle(*(m.Submit(spec(name, range(20), max_tokens=1)) for name in "abcd"))
    assert rig.runner.executed == [[("a", 4), ("b", 4), ("c", 4), ("d", 4)]]


def test_v3_the_only_prompt_is_not_capped_and_few_share_the_budget(engine, spec):
    own = SchedulerSettings(long_prefill_token_threshold=4)
    rig = engine(scheduler=own, max_batched_tokens=16, num_blocks=64, prefix_caching=False)
    rig.handle(m.Submit(spec("a", range(40), max_tokens=1)))
    rig.handle(m.Submit(spec("b", range(20), max_tokens=1)))
    assert rig.runner.executed == [[("a", 16)], [("a", 8), ("b", 8)]]


def test_v4_without_chunks_a_prompt_beyond_the_rest_of_the_budget_waits(engine, spec):
    """100 tokens of budget: 60 and 50 do not go together, and the 10 behind them wait too."""
    own = SchedulerSettings(chunked_prefill=False)
    rig = engine(scheduler=own, max_batched_tokens=100, num_blocks=64, prefix_caching=False)
    prompts = {"a": range(60), "b": range(50), "c": range(10)}
    rig.submit(prompts, max_tokens=2)
    rig.step()
    assert rig.runner.executed == [[("a", 60)], [("a", 1), ("b", 50), ("c", 10)]]


def test_v6_fcfs_knows_no_priorities(engine, spec):
    rig = engine(scheduler=SchedulerSettings(policy="fcfs"), max_sequences=1)
    for name, priority in [("a", 1), ("b", 0)]:
        rig.core.handle(m.Submit(spec(name, priority=priority, max_tokens=1)))
        rig.clock.advance(1)
    rig.run()
    assert [batch[0][0] for batch in rig.runner.executed] == ["a", "b"]


def test_v5_under_fcfs_the_last_arrived_is_preempted_whatever_its_priority(engine, spec):
    own = SchedulerSettings(policy="fcfs")
    rig = engine(scheduler=own, num_blocks=5, prefix_caching=False)
    for name, start, priority in [("a", 0, 1), ("b", 20, 0)]:
        prompt = range(start, start + 8)
        rig.core.handle(m.Submit(spec(name, prompt, max_tokens=6, priority=priority)))
        rig.clock.advance(1)
    rig.run()
    recomputed = [name for batch in rig.runner.executed for name, count in batch if count > 8]
    assert recomputed == ["b"]
