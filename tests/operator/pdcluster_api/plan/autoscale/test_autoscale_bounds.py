"""Min and max of pools, schedules by their own time zones, and bounds that exclude each other."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.base import bounds_of, is_on
from pdcluster_schema.autoscale import ScheduleSpec
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    IDLE,
    D,
    P,
    agreed,
    facts_of,
    make_spec,
    pool,
    reasons,
    rules_of,
    run,
    see,
    step_of,
    windows_of,
)


def schedule(start: str, end: str, **fields: Any) -> ScheduleSpec:
    if not fields.keys() & {"minReplicas", "maxReplicas"}:
        fields["maxReplicas"] = 9
    return ScheduleSpec.model_validate(
        {"name": "s", "role": "decode", "pool": "x", "start": start, "end": end, **fields}
    )


def utc(day: int, hour: int, minute: int = 0, month: int = 3) -> datetime:
    return datetime(2026, month, day, hour, minute, tzinfo=UTC)  # 1 March 2026 is a Sunday


@pytest.mark.parametrize(
    ("given", "wall", "on"),
    [
        (schedule("08:00", "18:00"), utc(4, 8), True),
        (schedule("08:00", "18:00"), utc(4, 7, 59), False),
        (schedule("08:00", "18:00"), utc(4, 18), False),
        (schedule("22:00", "06:00"), utc(4, 23), True),
        (schedule("22:00", "06:00"), utc(4, 5, 59), True),
        (schedule("22:00", "06:00"), utc(4, 6), False),
        # Saturday morning of a Friday's night
        (schedule("22:00", "06:00", days=["Fri"]), utc(7, 3), True),
        (schedule("22:00", "06:00", days=["Fri"]), utc(6, 3), False),
        (schedule("08:00", "18:00", days=["Mon", "Tue"]), utc(4, 9), False),
        (schedule("08:00", "08:00", days=["Wed"]), utc(4, 12), True),  # the whole day
        (schedule("08:00", "08:00", days=["Wed"]), utc(5, 7), True),
        (schedule("08:00", "08:00", days=["Wed"]), utc(5, 8), False),
        (schedule("09:00", "18:00", timeZone="Asia/Seoul"), utc(4, 0), True),
        (schedule("09:00", "18:00", timeZone="Asia/Seoul"), utc(4, 9), False),
        # the last Friday of winter time
        (schedule("09:00", "18:00", timeZone="Europe/Berlin"), utc(27, 8), True),
        # the first Monday of summer time
        (schedule("09:00", "18:00", timeZone="Europe/Berlin"), utc(30, 7), True),
        # an hour that is not there
        (schedule("02:15", "02:45", timeZone="Europe/Berlin"), utc(29, 1, 20), False),
        # an hour that is there twice
        (schedule("02:15", "02:45", timeZone="Europe/Berlin"), utc(25, 0, 20, month=10), True),
        (schedule("02:15", "02:45", timeZone="Europe/Berlin"), utc(25, 1, 20, month=10), True),
    ],
)
def test_a_schedule_is_on_by_the_clock_of_its_zone(given: ScheduleSpec, wall: datetime, on: bool):
    assert is_on(given, wall) is on


def test_of_several_schedules_the_last_that_gives_a_bound_counts():
    declared = make_spec(decode=[pool(4, minReplicas=1, maxReplicas=9)]).roles.decode
    assert declared is not None
    both = [
        schedule("00:00", "00:00", minReplicas=3, maxReplicas=5),
        schedule("12:00", "13:00", name="noon", minReplicas=4),
    ]

    assert bounds_of("decode", declared.pools[0], both, utc(4, 12)) == (4, 5, "schedule noon")
    assert bounds_of("decode", declared.pools[0], both, utc(4, 13)) == (3, 5, "schedule s")
    assert bounds_of("prefill", declared.pools[0], both, utc(4, 12)) == (
        1,
        9,
        "minReplicas and maxReplicas",
    )


def test_a_role_grows_to_its_max_and_shrinks_to_its_min():
    spec = make_spec(decode=[pool(4, minReplicas=4, maxReplicas=4)])

    up = see(spec, decode=replace(CALM, kv_cache_usage_ratio=0.9))
    down = agreed(spec, decode=IDLE)

    assert up.decision.replicas[D] == down.decision.replicas[D] == 4
    assert (step_of(up, rules.BOUNDS).before, step_of(up, rules.BOUNDS).after) == (5, 4)
    assert rules.BOUNDS in rules_of(down, "decode")


def test_a_schedule_moves_a_pool_at_once():
    spec = make_spec(
        schedules=[
            {
                "name": "day",
                "role": "decode",
                "pool": "x",
                "start": "08:00",
                "end": "18:00",
                "minReplicas": 6,
            }
        ]
    )
    facts = facts_of(spec)

    day = run(spec, facts, windows_of(facts), wall=utc(4, 12))
    night = run(spec, facts, windows_of(facts), wall=utc(4, 20))

    assert (day.decision.replicas[D], night.decision.replicas[D]) == (6, 4)
    assert "schedule day" in step_of(day, rules.BOUNDS, "decode/x").why


def test_of_bounds_that_exclude_each_other_max_wins_and_it_is_reported():
    spec = make_spec(
        decode=[pool(3, maxReplicas=3)],
        schedules=[
            {
                "name": "day",
                "role": "decode",
                "pool": "x",
                "start": "00:00",
                "end": "00:00",
                "minReplicas": 8,
            }
        ],
    )

    outcome = see(spec)

    assert outcome.decision.replicas[D] == 3
    assert reasons(outcome) == ["BoundsConflict"]


def test_a_cluster_that_asks_for_nothing_stays_so():
    spec = make_spec(prefill=[pool(0)], decode=[pool(0)])

    outcome = agreed(spec)

    assert outcome.decision.replicas == {P: 0, D: 0}
    assert (outcome.decision.steps, outcome.decision.problems) == ((), ())


def test_no_role_serves_without_the_other():
    spec = make_spec(prefill=[pool(0)], decode=[pool(2)])

    outcome = see(spec)

    assert outcome.decision.replicas == {P: 1, D: 2}
    assert rules.NEVER_ALONE in rules_of(outcome, "prefill")
    one = make_spec(prefill=[pool(1)], decode=[pool(1)])
    assert agreed(one, prefill=IDLE, decode=IDLE).decision.replicas == {P: 1, D: 1}


def test_the_last_ready_worker_of_a_role_stays_while_another_pool_takes_over_by_schedule():
    """At eight the pool of the night goes to 0, and that of the day has yet to start."""
    hours = {"role": "decode", "start": "08:00", "end": "20:00"}
    schedules = [
        {"name": "day", "pool": "day", "minReplicas": 4, **hours},
        {"name": "night", "pool": "night", "maxReplicas": 0, **hours},
    ]
    decode = [pool(4, "night", maxReplicas=8), pool(0, "day", maxReplicas=8)]
    spec = make_spec(
        decode=decode, schedules=schedules, scaleDown={"windowSeconds": 0, "maxStep": 0}
    )
    night, day = ("decode", "night"), ("decode", "day")

    begun = see(spec)
    waiting = see(
        spec,
        facts_of(spec, decode_night={"replicas": 1}, decode_day={"replicas": 4, "ready": 0}),
        decode=IDLE,
    )
    done = see(
        spec, facts_of(spec, decode_night={"replicas": 1}, decode_day={"replicas": 4, "ready": 1})
    )

    assert begun.decision.replicas == {P: 4, night: 1, day: 4}
    assert rules_of(begun, "decode/night") == [rules.BOUNDS, rules.NEVER_ALONE]
    assert waiting.decision.replicas == {P: 4, night: 1, day: 4}
    assert done.decision.replicas == {P: 4, night: 0, day: 4}
    assert not begun.decision.problems


@pytest.mark.parametrize(("unready_top", "size"), [(0, 4), (2, 2), (3, 1)])
def test_a_lowered_maximum_waits_for_the_one_ready_worker_where_it_may_be_among_those_that_go(
    unready_top: int, size: int
):
    spec = make_spec(decode=[pool(1, maxReplicas=1)])
    facts = facts_of(spec, decode={"replicas": 4, "ready": 1, "unready_top": unready_top})

    assert see(spec, facts).decision.replicas[D] == size
