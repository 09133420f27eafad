"""The autoscaler over short traces: it follows demand, keeps its limits, and its figures add up."""

import csv
import io
import itertools
from typing import Any

import pytest

from pdcluster_api.errors import InvalidTraceError, StartError
from pdcluster_schema.faults import InvalidObjectError
from pdctl.replay.queueing import Speeds, share_of_first
from pdctl.replay.report import summarize, summary_lines, write_table
from pdctl.replay.run import Moment, replay
from pdctl.replay.trace import Trace, TraceLoad
from tests.operator.pdctl.replay.small_replays import SPEEDS, make_spec, steady


def sizes(moments: list[Moment], role: str) -> list[int]:
    return [moment.pools[role, "x"].replicas for moment in moments]


def test_prompts_alone_grow_prefill_alone():
    # 3 workers' worth of prompts
    moments = list(replay(make_spec(), steady(6.0, 600.0, output_tokens=2.0), SPEEDS))

    assert len(moments) == 120
    assert moments[-1].demand["prefill"] == 3.0
    assert sizes(moments, "prefill")[-1] >= 4
    assert set(sizes(moments, "decode")) == {1}
    assert moments[-1].prefill_queue_requests == 0.0


def test_answers_alone_grow_decode_alone():
    moments = list(
        replay(make_spec(), steady(2.0, 600.0, input_tokens=10.0, output_tokens=2000.0), SPEEDS)
    )

    assert set(sizes(moments, "prefill")) == {1}
    assert max(sizes(moments, "decode")) > 2


def test_routers_are_left_out_of_a_replay():
    pools = {"pools": [{"name": "x", "replicas": 1, "minReplicas": 1, "maxReplicas": 6}]}
    router = {"pools": [{"name": "front", "replicas": 2}]}
    spec = make_spec({"prefill": pools, "decode": pools, "router": router})
    moments = list(replay(spec, steady(6.0, 60.0, output_tokens=2.0), SPEEDS))
    assert {role for role, _ in moments[-1].pools} == {"prefill", "decode"}


def test_a_role_shrinks_after_its_window_and_not_before():
    trace = Trace(
        (
            TraceLoad(0.0, 6.0, 500.0, 2.0),
            TraceLoad(300.0, 0.0, 500.0, 2.0),
            TraceLoad(600.0, 0.0, 500.0, 2.0),
        )
    )
    moments = list(replay(make_spec(), trace, SPEEDS))
    prefill = sizes(moments, "prefill")
    most = max(prefill)

    assert set(prefill[60 : 60 + 12]) == {most}
    assert prefill[-1] == 1
    assert all(before - after <= 1 for before, after in itertools.pairwise(prefill))


def test_new_workers_serve_only_after_their_start():
    moments = list(replay(make_spec(), steady(6.0, 300.0, output_tokens=2.0), SPEEDS))
    first = next(number for number, moment in enumerate(moments) if moment.record)
    ready = [moment.pools["prefill", "x"].ready for moment in moments]

    assert set(ready[: first + 4]) == {1}
    assert ready[first + 5] > 1


def test_budget_and_bounds_hold_at_every_moment():
    moments = list(replay(make_spec(budget={"total": 5}), steady(20.0, 600.0), SPEEDS))

    assert max(sum(pool.accelerators for pool in moment.pools.values()) for moment in moments) == 5
    assert "CapacityShort" not in {reason for moment in moments for reason in moment.problems}


def test_the_mode_does_not_matter():
    on, off = (
        list(replay(make_spec(mode=mode), steady(6.0, 120.0), SPEEDS)) for mode in ("On", "Off")
    )

    assert sizes(on, "prefill") == sizes(off, "prefill") != [1] * len(on)


def test_a_pool_of_faster_accelerators_serves_more():
    def roles(gpu: str) -> dict[str, Any]:
        pools = [
            {"name": "x", "gpu": "H100", "replicas": 1, "maxReplicas": 1},
            {"name": "y", "gpu": gpu, "replicas": 1, "maxReplicas": 1},
        ]
        return {"prefill": {"pools": pools}, "decode": {"pools": [{"name": "x", "replicas": 1}]}}

    slow, fast = (
        list(replay(make_spec(roles(gpu)), steady(10.0, 60.0), SPEEDS))[-1].prefill_queue_requests
        for gpu in ("H100", "B200")
    )
    assert slow > fast


def test_mixed_is_refused():
    spec = make_spec({"mixed": {"pools": [{"name": "x", "replicas": 1}]}})

    with pytest.raises(
        InvalidObjectError,
        match=r"spec\.roles\.mixed: cannot be replayed.*; give the roles prefill and decode",
    ):
        replay(spec, steady(1.0, 60.0), SPEEDS)


def test_a_trace_that_would_not_end_is_refused():
    with pytest.raises(
        InvalidTraceError, match="at most 500000 intervals of 5 s are replayed; cut the trace"
    ):
        replay(make_spec(), steady(1.0, 1e9), SPEEDS)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "prefill_tokens_per_second",
            0.0,
            "--prefill-tokens-per-second: must not be 0; give a finite number of more than 0",
        ),
        (
            "kv_tokens",
            float("nan"),
            "--kv-tokens: must not be nan; give a finite number of more than 0",
        ),
        ("start_seconds", -1.0, "--start-seconds: must not be -1; give a finite number from 0 on"),
    ],
)
def test_speeds_that_cannot_be_are_refused(field: str, value: float, message: str):
    with pytest.raises(StartError) as caught:
        Speeds(**{field: value})
    assert str(caught.value) == message


def test_figures_add_up():
    moments = list(replay(make_spec(), steady(6.0, 600.0, output_tokens=2.0), SPEEDS))
    found = summarize(moments, 5.0)
    workers = sum(pool.accelerators for moment in moments for pool in moment.pools.values())

    assert found.hours == pytest.approx(1 / 6)
    assert found.num_requests == pytest.approx(3600.0)
    assert found.accelerator_hours == {"H100": pytest.approx(workers * 5 / 3600)}
    assert found.accelerator_hours["H100"] < found.fixed_hours["H100"]
    assert 0.0 < found.over_ratio["prefill"] < 1.0
    assert found.over_ratio["decode"] == 0.0
    assert found.changes_per_hour == pytest.approx(found.num_changes * 6)
    assert found.unserved == 0.0


def test_workers_of_eight_accelerators_count_and_compute_as_eight():
    one = {"name": "x", "gpu": "H100", "replicas": 1, "maxReplicas": 6}
    eight = {**one, "name": "eight", "gpusPerReplica": 8}
    roles = {"prefill": {"pools": [eight]}, "decode": {"pools": [eight]}}
    spec = make_spec(roles, budget={"total": 24})
    hours = summarize(list(replay(spec, steady(20.0, 600.0), SPEEDS)), 5.0).fixed_hours["H100"]

    assert hours == pytest.approx(24 / 6)
    both = make_spec({"prefill": {"pools": [one, eight]}, "decode": {"pools": [one]}})
    pools = both.roles.present()["prefill"].pools
    shares = [share_of_first(both, "prefill", each) for each in pools]
    assert shares == [1.0, 8.0]


def test_streams_that_a_limit_cut_are_printed():
    moments = list(replay(make_spec(), steady(1.0, 60.0), SPEEDS))
    found = summarize(moments, 5.0)

    assert not any("cut" in line for line in summary_lines(found))
    assert "cut by the limit     2.0 streams (rollout.drainTimeoutSeconds)" in summary_lines(
        type(found)(**{**vars(found), "num_cut": 2.0})
    )


def test_table_has_a_row_for_each_interval_with_its_decision():
    moments = list(replay(make_spec(), steady(6.0, 60.0), SPEEDS))
    file = io.StringIO()
    write_table(moments, file)
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))

    assert [row["seconds"] for row in rows] == [str(5 * number) for number in range(12)]
    assert {
        "prefill_queue_requests",
        "kv_cache_usage_ratio",
        "prefill/x replicas",
        "decode/x draining",
    } <= set(rows[0])
    changed = next(row for row in rows if row["decision"])
    assert changed["decision"].startswith("prefill/x 1 to ")
