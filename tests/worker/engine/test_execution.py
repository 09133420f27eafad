"""A failing model: one bad request fails alone, a broken engine ends."""

import pytest

from pdcluster_worker.engine import messages as m
from pdcluster_worker.engine.execution import EngineBrokenError


def test_one_bad_request_of_a_batch_fails_alone(engine, spec):
    rig = engine()
    rig.runner.failing = {"bad": ValueError("no such position")}
    rig.handle(*(m.Submit(spec(request_id, [ord(request_id[0])])) for request_id in ("a", "bad", "c")))
    rig.run()
    assert rig.of(m.RequestFailed) == [m.RequestFailed("bad", "the model failed on this request: ValueError: no such position")]
    for request_id in "ac":
        assert rig.token_ids(request_id) == rig.runner.reference([ord(request_id)], 3)
    assert rig.blocks == {"free": 16}


def test_lone_bad_requests_never_end_the_engine(engine, spec):
    rig = engine()
    for number in range(5):
        rig.runner.failing = {f"bad{number}": ValueError("x")}
        rig.handle(m.Submit(spec(f"bad{number}")))
    assert len(rig.of(m.RequestFailed)) == 5


def test_three_whole_batches_that_fail_alike_end_the_engine(engine, spec):
    rig = engine()

    def fail_batch(number):
        rig.runner.failing = {f"{name}{number}": RuntimeError("device lost") for name in "ab"}
        rig.handle(*(m.Submit(spec(request_id)) for request_id in rig.runner.failing))

    fail_batch(0)
    fail_batch(1)
    assert len(rig.of(m.RequestFailed)) == 4
    with pytest.raises(EngineBrokenError, match="3 model steps in a row failed for every request: RuntimeError"):
        fail_batch(2)


def test_a_batch_that_works_clears_the_count_of_failed_ones(engine, spec):
    rig = engine()
    for number in range(6):
        rig.runner.failing = {f"{name}{number}": RuntimeError("x") for name in "ab"}
        rig.handle(*(m.Submit(spec(request_id)) for request_id in rig.runner.failing))
        if number % 2:
            rig.handle(m.Submit(spec("good", [9])))
            rig.run()
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
