"""Drafts in the engine: the same tokens in fewer steps, and blocks, limits and ends as without
them.

The drafter of these tests knows what will come, and is wrong where the test asks for it.
"""

import pytest

from pdcluster_worker.engine.in_flight import verified
from pdcluster_worker.engine.ports import DraftSamples, Sample, failed_row
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import (
    SCHEDULER_NAMES,
    SchedulerSettings,
    SpeculationSettings,
)

PROMPT = list(range(10))


class Oracle:
    """Drafts the right tokens but where a position is in `wrong`; follows: what it says of the step
    after.
    """

    def __init__(self, wrong=(), follows=True):
        self.wrong, self.follows = set(wrong), follows
        self.runner = None
        self.forgotten = []

    def may_follow(self, request):
        return self.follows

    def draft(self, requested):
        found = []
        for request, count in requested:
            right = self.runner.reference(request.tokens, count)
            start = request.num_tokens
            found.append(
                [token + (start + index in self.wrong) for index, token in enumerate(right)]
            )
        return found

    def forget(self, request_id):
        self.forgotten.append(request_id)


@pytest.fixture
def speculating(engine):
    """Builds an engine whose drafts are right but at these positions; sizes by keyword."""

    def build(wrong=(), follows=True, **sizes):
        oracle = Oracle(wrong, follows)
        rig = engine(
            drafter=oracle, speculation=sizes.pop("speculation", SpeculationSettings()), **sizes
        )
        oracle.runner = rig.runner
        rig.oracle = oracle
        return rig

    return build


def sizes_of(rig, request_id="a"):
    """Tokens of the request in each step that had some."""
    return [
        num_tokens
        for batch in rig.runner.executed
        for name, num_tokens in batch
        if name == request_id
    ]


def test_right_drafts_make_several_tokens_a_step_v30(speculating, spec):
    rig = speculating()
    rig.serve(spec("a", PROMPT, max_tokens=9))
    assert rig.token_ids("a") == rig.runner.reference(PROMPT, 9)
    assert sizes_of(rig) == [10, 4, 4]  # 1 token, then 4 and 4
    assert rig.tokens("a")[-1].finish_reason == "length"
    assert rig.stats.drafted == rig.stats.accepted == [2, 2, 2]
    assert rig.stats.generation_tokens == 9
    assert rig.stats.batches[-1] == (1, 0, 4, 0)
    assert rig.blocks == {"free": 12, "cached": 4}  # of 18 computed tokens
    assert rig.oracle.forgotten == ["a"]


@pytest.mark.parametrize(
    ("wrong", "steps", "accepted"),
    [({11}, 1, [0, 0, 0]), ({12}, 2, [1, 0, 0]), ({13}, 3, [1, 1, 0])],
)
def test_tokens_before_the_first_wrong_draft_count(wrong, steps, accepted, speculating, spec):
    rig = speculating(wrong)
    rig.handle(m.Submit(spec("a", PROMPT, max_tokens=20)))
    rig.step()
    assert len(rig.tokens("a")) == 1 + steps
    assert rig.token_ids("a") == rig.runner.reference(PROMPT, 1 + steps)
    rig.run()
    assert rig.token_ids("a") == rig.runner.reference(PROMPT, 20)
    first = rig.of(m.EngineStats)[-1]
    assert first.drafted[0] > 0


def test_drafts_end_where_the_request_must(speculating, spec):
    """A step gives one token more than its drafts: with 2 to come one draft is of
    use, with 1 none.
    """
    rig = speculating()
    rig.handle(
        m.Submit(spec("a", PROMPT, max_tokens=3)), m.Submit(spec("b", PROMPT[:5], max_tokens=2))
    )
    rig.run()
    assert sizes_of(rig) == [10, 2]
    assert sizes_of(rig, "b") == [5, 1]
    rig = speculating(max_model_len=13)
    rig.serve(spec("a", PROMPT, max_tokens=99))
    assert len(rig.tokens("a")) == 3
    assert sizes_of(rig) == [10, 2]


@pytest.mark.parametrize("index", [1, 2, 3])
def test_stop_token_inside_an_accepted_run_ends_it(index, speculating, engine, spec):
    expected = engine().runner.reference(PROMPT, 9)
    for ends in ({"eos_token_ids": [expected[index]]}, {"stop_token_ids": [expected[index]]}):
        rig = speculating()
        rig.serve(spec("a", PROMPT, max_tokens=9, **ends))
        assert rig.token_ids("a") == expected[: index + 1]
        last = rig.tokens("a")[-1]
        assert last.finish_reason == "stop"
        assert last.stop_reason == (expected[index] if "stop_token_ids" in ends else None)
        assert set(rig.blocks) == {"free", "cached"}


def test_ignored_end_and_min_tokens_are_passed_inside_a_run(speculating, engine, spec):
    expected = engine().runner.reference(PROMPT, 9)
    for more in ({"ignore_eos": True}, {"min_tokens": 5}):
        rig = speculating()
        rig.serve(spec("a", PROMPT, max_tokens=9, eos_token_ids=[expected[2]], **more))
        assert rig.token_ids("a") == expected


def test_blocks_of_wrong_drafts_are_given_back_and_have_no_hash(speculating, engine, spec):
    """At 11 tokens of blocks of 4, three drafts want a fourth block; hashes are those of an engine
    without drafts.
    """
    rig = speculating({11, 12, 13, 14, 15, 16, 17, 18})
    rig.core.handle(m.Submit(spec("a", PROMPT, max_tokens=8)))
    held = []
    while rig.core.has_work:
        rig.step()
        held.append(rig.blocks.get("in_use", 0))
    plain = engine()
    plain.serve(spec("a", PROMPT, max_tokens=8))
    hashes = [
        {stored for events in each.of(m.BlockEvents) for stored in events.stored}
        for each in (rig, plain)
    ]
    assert hashes[0] == hashes[1]
    assert rig.token_ids("a") == plain.token_ids("a")
    assert held[0] == 3  # 11 tokens known
    assert rig.stats.accepted == [0, 0, 0]


def test_drafts_take_no_block_that_a_request_would_lose(speculating, spec):
    """Two requests in four blocks of 4: drafts get the room that is left in a block."""
    rig = speculating(num_blocks=4, prefix_caching=False)
    rig.handle(
        m.Submit(spec("a", PROMPT[:6], max_tokens=3)), m.Submit(spec("b", PROMPT[:5], max_tokens=4))
    )
    rig.run()
    assert rig.stats.preemptions == 0
    assert [sizes_of(rig, name) for name in "ab"] == [[6, 2], [5, 3]]
    assert rig.blocks == {"free": 4}


def test_drafts_have_the_budget_that_is_left(speculating, spec):
    rig = speculating(max_batched_tokens=12)
    rig.handle(m.Submit(spec("a", PROMPT, max_tokens=12)))
    rig.serve(spec("b", range(50, 70), max_tokens=2))
    batches = [dict(batch) for batch in rig.runner.executed]
    assert batches[:3] == [{"a": 10}, {"a": 1, "b": 11}, {"a": 3, "b": 9}]
    assert rig.token_ids("a") == rig.runner.reference(PROMPT, 12)


def test_nothing_is_drafted_above_so_many_running_requests(speculating, spec):
    rig = speculating(speculation=SpeculationSettings(disable_above_running=1))
    rig.handle(
        m.Submit(spec("a", PROMPT, max_tokens=6)), m.Submit(spec("b", PROMPT[:4], max_tokens=20))
    )
    rig.run()
    assert sizes_of(rig) == [10, 1, 1, 1, 1, 1]
    assert 4 in sizes_of(rig, "b")[6:]  # alone


def test_prefill_for_a_peer_is_never_drafted_and_its_request_is_at_the_decode_side(pair, spec):
    decode, prefill = Oracle(), Oracle()
    both = pair(
        decode={"drafter": decode, "speculation": SpeculationSettings()},
        prefill={"drafter": prefill, "speculation": SpeculationSettings()},
    )
    decode.runner, prefill.runner = both.decode.runner, both.prefill.runner
    both.start(spec("a", PROMPT, max_tokens=9))
    both.finish()
    both.check(PROMPT, 9)
    assert sizes_of(both.prefill) == [10]
    assert sizes_of(both.decode) == [4, 4]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", SCHEDULER_NAMES)
def test_every_scheduler_makes_the_same_tokens_in_few_blocks(name, depth, speculating, spec):
    """Preemption, prefix hits and wrong drafts at once."""
    wrong = {12, 17, 18, 19, 25, 27}
    rig = speculating(
        wrong,
        depth=depth,
        num_blocks=12,
        max_batched_tokens=100,
        scheduler=SchedulerSettings(name=name),
    )
    prompts = {"a": PROMPT, "b": [*PROMPT[:8], 50], "c": list(range(20, 33)), "d": PROMPT}
    rig.submit(prompts, max_tokens=12)
    rig.run()
    rig.check(prompts, 12)
    assert sum(rig.stats.drafted) > sum(rig.stats.accepted) > 0
    assert set(rig.blocks) == {"free", "cached"}


def test_step_ahead_waits_for_a_step_with_drafts_and_for_one_that_may_have_some_after_it(
    speculating, spec
):
    rig = speculating(depth=2)
    rig.serve(spec("a", PROMPT, max_tokens=9))
    assert sizes_of(rig) == [10, 4, 4]
    rig = speculating(depth=2, follows=False)
    rig.serve(spec("a", PROMPT, max_tokens=9))
    assert sizes_of(rig) == [10, *[1] * 8]
    assert rig.token_ids("a") == rig.runner.reference(PROMPT, 9)


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_in_the_middle_of_a_step_with_drafts(depth, speculating, spec):
    rig = speculating(depth=depth)
    rig.submit({"a": PROMPT, "b": range(40, 50)}, max_tokens=30)
    rig.step()
    rig.handle(m.Abort("a"))
    rig.run()
    assert rig.token_ids("b") == rig.runner.reference(list(range(40, 50)), 30)
    assert set(rig.blocks) == {"free", "cached"}
    assert sorted(rig.oracle.forgotten) == ["a", "b"]


def test_failed_row_fails_its_request_and_only_if_it_is_the_first():
    error = failed_row("not_finite", "no")
    one, two = Sample(5), Sample(6)
    assert verified((5, 7), [one, two, error]) == DraftSamples((one, two))
    assert verified((5, 6), [one, two, error]) == DraftSamples((one, two))
    assert verified((5, 6), [one, error, two]) == DraftSamples((one,))
    assert verified((5,), [error, one]) is error
    assert verified((), [one]) is one


def test_request_whose_row_fails_ends_and_others_go_on(speculating, spec):
    rig = speculating()
    rig.handle(
        m.Submit(spec("a", PROMPT, max_tokens=30)),
        m.Submit(spec("b", range(40, 50), max_tokens=10)),
    )
    rig.runner.failing_rows["a"] = failed_row("not_finite", "its logits are not finite")
    rig.run()
    (failed,) = rig.of(m.RequestFailed)
    assert failed.request_id == "a"
    assert rig.token_ids("b") == rig.runner.reference(list(range(40, 50)), 10)
    assert set(rig.blocks) == {"free", "cached"}


def test_raising_step_is_tried_again_with_its_drafts(speculating, spec):
    rig = speculating()
    rig.submit({"a": PROMPT, "b": range(40, 50)}, max_tokens=9)
    rig.runner.failing["a"] = RuntimeError("broken")
    rig.run()
    assert [failed.request_id for failed in rig.of(m.RequestFailed)] == ["a"]
    assert rig.token_ids("b") == rig.runner.reference(list(range(40, 50)), 9)


def test_window_gives_back_what_left_it_under_drafts(speculating, spec):
    rig = speculating({14, 19}, window=6, num_blocks=12)
    rig.submit({"a": PROMPT, "b": range(40, 50)}, max_tokens=20)
    rig.run()
    rig.check({"a": PROMPT, "b": list(range(40, 50))}, 20)
