"""Drafts by a second model, over blocks of its own: followed, computed once, given back, and never
more than a guess.
"""

import pytest

from pdcluster_worker.engine.drafters import DraftSizes, ModelDrafter
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.engine_settings import SpeculationSettings
from pdcluster_worker.messages.requests import SamplingParams
from tests.worker.fake_runner import FakeRunner

PROMPT = list(range(10))
SIZES = {
    "num_blocks": 32,
    "block_size": 4,
    "max_batched_tokens": 64,
    "max_model_len": 100,
    "vocab_size": 1000,
    "draft_vocab_size": 1000,
}


def drafter(weight=1, **sizes):
    sizes = SIZES | sizes
    runner = FakeRunner(sizes["num_blocks"], sizes["block_size"], weight=weight)
    return ModelDrafter(runner, DraftSizes(**sizes)), runner


def request(tokens, name="a"):
    return EngineRequest(name, list(tokens), len(PROMPT), SamplingParams(max_tokens=99, seed=0))


def check(made):
    made.pool.check()
    held = [block for shadow in made._shadows.values() for block in shadow.block_table]
    assert len(held) == len(set(held)) == made.pool.counts()["in_use"]


def test_drafts_are_what_the_model_decodes_and_only_new_tokens_are_computed():
    made, runner = drafter()
    one = request(PROMPT)
    (first,) = made.draft([(one, 3)])
    assert first == runner.reference(PROMPT, 3)
    assert runner.executed == [[("a", 10)], [("a", 1)], [("a", 1)]]
    one.tokens += [*first[:2], 77]  # the third was wrong
    (second,) = made.draft([(one, 2)])
    assert second == runner.reference(one.tokens, 2)
    assert runner.executed[3:] == [[("a", 1)], [("a", 1)]]
    one.tokens += [55, 56]  # all were wrong, and one was drafted by no step
    assert made.draft([(one, 1)]) == [runner.reference(one.tokens, 1)]
    assert runner.executed[5:] == [[("a", 2)]]
    check(made)
    made.forget("a")
    made.forget("a")
    assert made.pool.counts()["free"] == 32
    assert runner.forgotten == ["a"]


def test_long_prompt_catches_up_by_one_batch_in_a_step_and_holds_up_no_other():
    made, runner = drafter(max_batched_tokens=8)
    long, short = request(range(20), "long"), request(PROMPT[:4], "short")
    assert made.draft([(long, 2), (short, 2)]) == [[], runner.reference(short.tokens, 2)]
    assert runner.executed == [[("short", 4), ("long", 4)], [("short", 1)]]
    assert made.draft([(long, 2)]) == [[]]
    assert made.draft([(long, 2)]) == [runner.reference(long.tokens, 2)]
    check(made)


def test_blocks_are_taken_from_the_least_recently_drafted():
    made, runner = drafter(num_blocks=8)
    for name in "ab":
        made.draft([(request(PROMPT, name), 2)])  # 3 blocks each
    made.draft([(request(PROMPT, "a"), 2)])
    assert made.draft([(request(PROMPT, "c"), 2)]) == [runner.reference(PROMPT, 2)]
    assert runner.forgotten == ["b"]
    # No room for all that are asked for together: the last goes without.
    found = made.draft([(request(PROMPT, name), 2) for name in "acd"])
    assert [bool(drafts) for drafts in found] == [True, True, False]
    check(made)


def test_nothing_is_drafted_beyond_the_models_length_or_the_other_vocabulary():
    made, runner = drafter(max_model_len=12)
    assert made.draft([(request(PROMPT), 3)]) == [runner.reference(PROMPT, 2)]
    assert made.draft([(request([*PROMPT, 1, 2]), 3)]) == [[]]
    assert not made.may_follow(request([*PROMPT, 1, 2]))
    least = min(FakeRunner(32, 4).reference(PROMPT, 3))
    made, runner = drafter(vocab_size=least)
    assert all(token < least for drafts in made.draft([(request(PROMPT), 3)]) for token in drafts)


def test_request_with_a_token_that_the_draft_model_has_not_is_not_drafted_and_others_are():
    made, runner = drafter(draft_vocab_size=500)
    strange, plain = request([*PROMPT, 500], "strange"), request(PROMPT, "plain")
    assert made.may_follow(strange)  # not looked at yet
    for _ in range(2):
        assert made.draft([(strange, 3), (plain, 3)]) == [[], runner.reference(PROMPT, 3)]
    assert {name for batch in runner.executed for name, _ in batch} == {"plain"}
    assert not made.may_follow(strange)
    check(made)
    made.forget("strange")
    assert not made._unknown


def test_failing_draft_model_gives_no_drafts_and_starts_over():
    made, runner = drafter()
    runner.failing["a"] = RuntimeError("broken")
    assert made.draft([(request(PROMPT), 3)]) == [[]]
    assert made.pool.counts()["free"] == 32
    runner.failing.clear()
    assert made.draft([(request(PROMPT), 3)]) == [runner.reference(PROMPT, 3)]


@pytest.mark.parametrize("weight", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_engine_gives_the_same_tokens_whatever_the_draft_model_guesses(weight, depth, engine, spec):
    """A model of weight 1 is always right here, one of weight 2 hardly ever."""
    made, _ = drafter(weight, num_blocks=12)
    settings = SpeculationSettings(adaptive=False)
    rig = engine(drafter=made, speculation=settings, depth=depth, num_blocks=12)
    prompts = {"a": PROMPT, "b": [*PROMPT[:8], 50], "c": list(range(20, 33))}
    rig.submit(prompts, max_tokens=12)
    rig.run()
    rig.check(prompts, 12)
    assert sum(rig.stats.drafted) > 0
    assert (sum(rig.stats.accepted) == sum(rig.stats.drafted)) == (weight == 1)
    assert made.pool.counts()["free"] == 12
