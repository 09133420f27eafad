"""The offload bench: the same load for each mode, clusters that differ in their routing alone; its
workers need the model.
"""

from typing import Any, cast

import offload_curve
import pytest
import yaml
from offload_curve import LENGTHS, POLICIES, QUEUES, needs_ping, row, with_routing

from pdcluster_schema.load import parse
from pdctl.bench.load import LoadResult, RequestResult


def test_load_has_the_same_lengths_for_each_mode_and_no_prompt_twice() -> None:
    load, other = needs_ping(LENGTHS, 200, 8, "s", "a"), needs_ping(LENGTHS, 200, 8, "s", "b")

    assert {len(ask.prompt) for ask in load} == set(LENGTHS)
    assert load == needs_ping(LENGTHS, 200, 8, "s", "a")
    assert [len(ask.prompt) for ask in load] == [len(ask.prompt) for ask in other]
    assert len({tuple(ask.prompt) for ask in (*load, *other)}) == 400


@pytest.mark.parametrize("name", [*POLICIES, *QUEUES])
def test_every_variant_is_a_cluster_that_the_operator_takes(name: str) -> None:
    routing = {**POLICIES, **QUEUES}[name]
    cluster = parse(yaml.safe_load(with_routing(routing)))
    found = cluster.spec.routing

    assert name in (found.offload.policy, found.prefill_queue.mode)


def test_every_policy_and_mode_is_measured() -> None:
    assert set(QUEUES) == {"immediate", "latencyFirst", "throughputFirst"}
    assert set(POLICIES) == {"rule", "measured", "sloFeedback", "score"}


def test_row_has_the_means_of_what_clients_saw() -> None:
    run = LoadResult(
        (
            RequestResult(0.0, 0.0, (0.1, 0.2), 2),
            RequestResult(0.0, 0.0, (0.3, 0.4), 2),
            RequestResult(0.0, 0.0, (), 0, "lost"),
        ),
        1.0,
        0.0,
    )

    assert (
        row("auto", 2.0, run, 0.5, 1.5)
        == "| 2 | auto | 200 | 280 | 100.0 | 300 | 0.50 | 1.50 | 1 |"
    )


def test_a_request_says_where_its_prompt_is_computed() -> None:
    target = offload_curve.Placed(cast(Any, None), "http://h", "m", mode="remote")

    assert target.body(needs_ping((1,), 1, 1, "s", "a")[0])["pdcluster"] == {"prefill": "remote"}
