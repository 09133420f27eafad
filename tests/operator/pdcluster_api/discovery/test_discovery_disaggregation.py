"""Disaggregation in a record is read with care: nonsense hides neither the worker nor
the others.
"""

import json
from typing import Any

import pytest

from pdcluster_api.discovery.etcd import parse_record, read_disaggregation
from pdcluster_api.plan.observed.state import WorkerDisaggregation

RECORD = {
    "engine_id": "e",
    "state": "ready",
    **{f"{kind}_address": "h:1" for kind in ("http", "grpc", "kv")},
}


@pytest.mark.parametrize(
    "said",
    [
        None,
        7,
        [],
        {},
        {"transport": "tcp", "refused": 7},
        {"transport": "tcp", "refused": ["p"]},
        {"transport": "tcp", "refused": [{"pod": "p"}]},
        {"transport": "tcp", "num_refused": -1},
        {"transport": "tcp", "long_prompts": "many"},
        {"transport": "tcp", "long_prompts": 10**16},
        {"transport": "tcp", "long_prompts": float("inf")},
        {"transport": "tcp", "remote_ratio": 1.5},
        {"transport": "tcp", "remote_ratio": float("nan")},
        {"transport": "tcp", "bytes_per_second": None},
    ],
)
def test_nonsense_is_nothing_and_leaves_the_rest_of_the_record(said: Any) -> None:
    assert read_disaggregation({"disaggregation": said}) is None
    record = parse_record("decode/cpu/d-0", json.dumps({**RECORD, "disaggregation": said}).encode())
    assert record is not None
    assert (record.state, record.disaggregation) == ("ready", None)


def test_an_older_workers_record_has_none() -> None:
    record = parse_record("decode/cpu/d-0", json.dumps(RECORD).encode())
    assert record is not None
    assert record.disaggregation is None


def test_what_would_fill_the_status_is_cut() -> None:
    refused = [{"pod": "p" * 100, "reason": "x" * 10_000}] * 50
    found = read_disaggregation(
        {
            "disaggregation": {
                "transport": "t" * 100,
                "refused": refused,
                "num_refused": 50,
                "more": 1,
            }
        }
    )

    assert found == WorkerDisaggregation("t" * 63, (("p" * 63, "x" * 397 + "..."),) * 8, 50)


def test_tiers_that_stopped_are_read_and_what_is_no_list_hides_nothing() -> None:
    stopped = [{"tier": "disk", "reason": "No space left"}] * 9
    record = parse_record(
        "decode/cpu/d-0", json.dumps({**RECORD, "stopped_tiers": stopped}).encode()
    )
    assert record is not None
    assert record.stopped_tiers == (("disk", "No space left"),) * 3
    for wrong in (7, [1], [{"tier": "disk"}], None, {"tier": 1}):
        record = parse_record(
            "decode/cpu/d-0", json.dumps({**RECORD, "stopped_tiers": wrong}).encode()
        )
        assert record is not None
        assert (record.state, record.stopped_tiers) == ("ready", ())
