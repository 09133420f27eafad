"""Under `preemptive` a waiting request takes the place of a running one of lower priority, which
loses no token.
"""

import pytest

from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import SchedulerSettings

PREEMPTIVE = SchedulerSettings(policy="preemptive")


def preempted(rig) -> int:
    return rig.core._scheduler.num_preemptions


@pytest.mark.parametrize(
    ("policy", "low", "high", "expected"),
    [
        ("preemptive", 1, 0, "lhl"),
        ("preemptive", 0, 0, "lh"),
        ("preemptive", 0, 1, "lh"),
        ("priority", 1, 0, "lh"),
        ("fcfs", 1, 0, "lh"),
    ],
)
def test_a_seat_goes_to_the_higher_priority(engine, spec, policy, low, high, expected):
    rig = engine(max_sequences=1, scheduler=SchedulerSettings(policy=policy))
    rig.handle(m.Submit(spec("l", [1, 2], max_tokens=6, priority=low)))
    rig.step()
    rig.clock.advance(1)
    rig.serve(spec("h", [3, 4, 5], max_tokens=3, priority=high))

    ran = [request_id for batch in rig.runner.executed for request_id, _ in batch]
    assert (
        "".join(each for each, before in zip(ran, ["", *ran], strict=False) if each != before)
        == expected
    )
    assert rig.token_ids("l") == rig.runner.reference([1, 2], 6)
    assert rig.token_ids("h") == rig.runner.reference([3, 4, 5], 3)
    assert preempted(rig) == (expected == "lhl")


def test_blocks_are_taken_from_the_lowest_and_as_many_as_needed(engine, spec):
    """Blocks of 4: both low ones hold 2 of 5, and the high one needs 4."""
    rig = engine(num_blocks=5, max_batched_tokens=32, scheduler=PREEMPTIVE)
    rig.handle(
        m.Submit(spec("a", range(6), max_tokens=2, priority=1)),
        m.Submit(spec("b", range(20, 26), max_tokens=2, priority=2)),
    )
    rig.serve(spec("h", range(40, 53), max_tokens=2))

    for request_id, prompt in (("a", range(6)), ("b", range(20, 26)), ("h", range(40, 53))):
        assert rig.token_ids(request_id) == rig.runner.reference(list(prompt), 2)
    order = [request_id for batch in rig.runner.executed for request_id, _ in batch]
    assert order.index("h") < max(at for at, each in enumerate(order) if each == "a")
    assert preempted(rig) == 2


def test_nothing_is_taken_where_it_would_not_be_enough(engine, spec):
    """The blocks that the equal one holds are missing: the low one goes on."""
    rig = engine(num_blocks=5, max_batched_tokens=32, scheduler=PREEMPTIVE)
    rig.handle(
        m.Submit(spec("equal", range(10), max_tokens=3)),
        m.Submit(spec("low", range(20, 22), max_tokens=3, priority=1)),
    )
    rig.serve(spec("h", range(40, 54), max_tokens=2))

    assert preempted(rig) == 0
    assert rig.token_ids("h") == rig.runner.reference(list(range(40, 54)), 2)


def test_a_prompt_that_never_fits_displaces_no_request(engine, spec):
    rig = engine(num_blocks=4, max_model_len=64, scheduler=PREEMPTIVE)
    rig.handle(m.Submit(spec("low", [1, 2], max_tokens=4, priority=1)))
    rig.serve(spec("h", range(40), max_tokens=2))

    assert preempted(rig) == 0
    assert rig.token_ids("low") == rig.runner.reference([1, 2], 4)
