"""A decision as rows of text, and as stored in the status."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from pdcluster_api.plan.autoscale import explain
from pdcluster_api.plan.autoscale.explain import (
    COLUMNS,
    explained,
    read_record,
    remembered,
    summary,
    write_record,
)
from pdcluster_api.plan.observed.state import DecisionInput, DecisionStep, Problem, ScalingDecision
from tests.operator.pdcluster_api.plan.autoscale.worlds import CALM, facts_of, make_spec, pool, see

AT = datetime(2026, 3, 4, 12, 0, 5, tzinfo=UTC)


def grown() -> Any:
    spec = make_spec(prefill=[pool(2)], ratio={"min": 0.5}, budget={"total": 8})
    return see(spec, facts_of(spec), decode=replace(CALM, num_requests_waiting=20.0))


def test_rows_lead_from_numbers_to_replicas():
    outcome = grown()

    rows = explained(
        replace(
            outcome.decision, problems=(Problem("CapacityShort", "B200 is short of 2 workers"),)
        )
    )

    assert {len(row) for row in rows} == {len(COLUMNS)}
    text = "\n".join("  ".join(row) for row in rows)
    assert "decode  sees      num_requests_waiting 80, threshold 16" in text
    assert "decode  need  4  8  num_requests_waiting 80 over 16" in text
    assert [row[1] for row in rows if row[0].startswith("decode")] == [
        *["sees"] * 4,
        "need",
        "budget",
        "pool",
        "result",
    ]
    assert ("decode", "result", "", "5", "x 5") in rows
    assert rows[-1][-1] == "CapacityShort: B200 is short of 2 workers"


def test_a_number_that_is_not_known_is_called_so():
    rows = explained(
        ScalingDecision({("decode", "x"): 1}, (DecisionInput("decode", "ttft", None),))
    )

    assert rows[0][-1] == "ttft unknown"


def test_the_summary_says_what_changed():
    assert summary(grown().decision) == "prefill/x 2 to 3, decode/x 4 to 5"
    assert summary(see(make_spec()).decision) == ""


def test_a_record_is_read_as_it_was_written():
    outcome = grown()
    record = replace(outcome.decision, at=AT, problems=(Problem("RatioConstraintViolated", "no"),))

    entry = json.loads(json.dumps(write_record(record), allow_nan=False))

    assert entry["at"] == "2026-03-04T12:00:05Z"
    assert read_record(entry) == record


def test_a_record_is_read_though_the_api_server_drops_an_unknown_value():
    unknown = DecisionInput("prefill", "ttft", None, 8.0)
    entry = write_record(ScalingDecision({}, (unknown,), at=AT))
    stored = {**entry, "inputs": [{**each} for each in entry["inputs"]]}
    for each in stored["inputs"]:
        each.pop("value", None)

    found = read_record(stored)
    assert found is not None
    assert found.inputs == (unknown,)


def test_times_are_written_in_utc_and_whole_seconds():
    local = AT.astimezone(timezone(timedelta(hours=9))).replace(microsecond=7)

    assert write_record(ScalingDecision({}, at=local))["at"] == "2026-03-04T12:00:05Z"


def test_a_record_is_bounded():
    step = DecisionStep("need", "decode", 1, 2, "x" * 10_000)
    decision = ScalingDecision(
        {("decode", "x"): 1}, (DecisionInput("decode", "n", 1.0),) * 1000, (step,) * 1000
    )
    record = replace(decision, at=AT, problems=(Problem("r", "y" * 10_000),) * 1000)

    entries = remembered([write_record(record)] * 40, record)

    assert len(entries) == explain.MAX_DECISIONS
    assert len(json.dumps(entries)) < 400_000
    assert read_record(entries[0]) is not None


def test_the_newest_decision_stands_first_and_what_cannot_be_read_is_dropped():
    first, second = ScalingDecision({}, at=AT), ScalingDecision({}, at=AT + timedelta(seconds=5))

    entries = remembered(remembered(None, first), second)

    assert [entry["at"] for entry in entries] == ["2026-03-04T12:00:10Z", "2026-03-04T12:00:05Z"]
    assert remembered([{"at": "yesterday"}, *entries], first)[1:] == entries


@pytest.mark.parametrize(
    "entry",
    [
        None,
        "x",
        3,
        {},
        {"at": "2026-03-04T12:00:05Z"},
        {**write_record(ScalingDecision({}, at=AT)), "steps": [{}]},
    ],
)
def test_what_another_writer_wrote_is_no_record(entry: object):
    assert read_record(entry) is None
