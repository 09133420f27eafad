"""A failing model: one bad request fails alone, a broken engine ends."""

import pytest

from pdcluster_worker.engine.ports import EngineBrokenError, StepSeconds, failed_row
from pdcluster_worker.messages import engine as m


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("kind", "error", "message", "reason"),
    [
        ("failing", ValueError("no such position"), "ValueError: no such position", "raised"),
        ("failing_rows", failed_row("not_finite", "it is NaN"), "it is NaN", "not_finite"),
    ],
)
def test_one_bad_request_of_a_batch_fails_alone_and_once(
    engine, spec, depth, kind, error, message, reason
):
    """depth 2: also with a step behind it, which is run again when its tokens are known."""
    rig = engine(depth=depth)
    setattr(rig.runner, kind, {"bad": error})
    rig.submit({name: [ord(name[0])] for name in ("a", "bad", "c")})
    rig.run()
    why = f"the model failed on this request: {message}"
    assert rig.of(m.RequestFailed) == [m.RequestFailed("bad", why)]
    rig.check({name: [ord(name)] for name in "ac"}, 3)
    assert rig.stats.failed_rows == {reason: 1}
    assert rig.blocks == {"free": 16}
    if kind == "failing_rows" and depth == 1:
        assert rig.runner.executed[0] == [("a", 1), ("bad", 1), ("c", 1)]
        assert all(len(batch) == 2 for batch in rig.runner.executed[1:])  # nothing ran again


def test_lone_bad_requests_never_end_the_engine(engine, spec):
    rig = engine()
    for number in range(5):
        rig.runner.failing = {f"bad{number}": ValueError("x")}
        rig.handle(m.Submit(spec(f"bad{number}")))
    assert len(rig.of(m.RequestFailed)) == 5


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("failing", RuntimeError("device lost")),
        ("failing_rows", failed_row("not_finite", "NaN")),
    ],
)
def test_three_whole_batches_that_fail_alike_end_the_engine(engine, spec, kind, error):
    rig = engine()

    def fail_batch(number):
        setattr(rig.runner, kind, {f"{name}{number}": error for name in "ab"})
        rig.handle(*(m.Submit(spec(f"{name}{number}")) for name in "ab"))

    fail_batch(0)
    fail_batch(1)
    assert len(rig.of(m.RequestFailed)) == 4
    with pytest.raises(EngineBrokenError, match="3 model steps in a row failed for every request"):
        fail_batch(2)


def test_a_rank_that_is_gone_ends_the_engine_and_nothing_is_tried_again(engine, spec):
    rig = engine()
    rig.runner.failing = {"a": EngineBrokenError("a rank of this engine is gone")}
    with pytest.raises(EngineBrokenError, match="a rank of this engine is gone"):
        rig.handle(m.Submit(spec("a")), m.Submit(spec("b")))
    assert len(rig.runner.executed) == 1


def test_a_batch_that_works_clears_the_count_of_failed_ones(engine, spec):
    rig = engine()
    for number in range(6):
        rig.runner.failing = {f"{name}{number}": RuntimeError("x") for name in "ab"}
        rig.handle(*(m.Submit(spec(request_id)) for request_id in rig.runner.failing))
        if number % 2:
            rig.serve(spec("good", [9]))
    assert len(rig.of(m.RequestFailed)) == 12


def test_a_failing_prefill_is_answered_and_its_send_cancelled(pair, spec):
    both = pair(prefill={"max_batched_tokens": 4})
    both.start(spec("a", range(10)))
    both.prefill.runner.failing = {"a": ValueError("x")}
    both.prefill.step()
    both.prefill.step()
    assert [failure.request_id for failure in both.prefill.of(m.RequestFailed)] == ["a"]
    assert both.prefill.of(m.PrefillFailed) == []
    assert set(both.prefill.blocks) == {"free", "cached"}


def test_a_row_may_fail_before_its_prompt_is_computed(engine, spec):
    rig = engine(max_batched_tokens=4)
    rig.runner.failing_rows = {"bad": failed_row("unknown_token_ids", "logit_bias: no token 2000")}
    rig.handle(m.Submit(spec("bad", range(10))))
    assert [failure.request_id for failure in rig.of(m.RequestFailed)] == ["bad"]
    assert rig.blocks == {"free": 16}


def test_a_row_that_its_own_settings_make_fail_is_a_refusal(engine, spec):
    rig = engine()
    rig.runner.failing_rows = {
        "slow": failed_row("slow_grammar", "takes too long", param="constraint"),
        "nan": failed_row("not_finite", "NaN"),
    }
    rig.handle(*(m.Submit(spec(name)) for name in ("a", "slow", "nan")))
    rig.run()

    refused, failed = rig.of(m.RequestFailed)
    assert refused == m.RequestFailed("slow", "takes too long", is_refusal=True, param="constraint")
    assert not failed.is_refusal
    assert len(rig.token_ids("a")) == 3


def test_failed_rows_are_counted_by_their_reason(engine, spec):
    rig = engine()
    rig.runner.failing_rows = {
        "nan": failed_row("not_finite", "x"),
        "nan2": failed_row("not_finite", "x"),
        "none": failed_row("no_token_left", "x"),
    }
    rig.handle(*(m.Submit(spec(request_id)) for request_id in ("a", *rig.runner.failing_rows)))
    rig.runner.failing = {"raises": ValueError("x")}
    rig.serve(spec("raises"))
    assert rig.stats.failed_rows == {"not_finite": 2, "no_token_left": 1, "raised": 1}


def test_requests_at_fault_never_end_the_engine_however_many(engine, spec):
    rig = engine()
    for number in range(5):
        names = [f"{name}{number}" for name in "ab"]
        rig.runner.failing_rows = {name: failed_row("no_token_left", "x") for name in names}
        rig.handle(*(m.Submit(spec(name)) for name in names))
    assert len(rig.of(m.RequestFailed)) == 10


def test_statistics_say_where_the_models_time_went_retries_included(engine, spec):
    rig = engine()
    rig.runner.seconds = StepSeconds(inputs=1.0, forward=20.0, sample=3.0)
    rig.runner.failing = {"bad": ValueError("x")}
    rig.handle(*(m.Submit(spec(request_id, max_tokens=1)) for request_id in ("a", "bad", "c")))
    stats = rig.stats
    assert (stats.inputs_seconds, stats.forward_seconds, stats.sample_seconds) == (2.0, 40.0, 6.0)
