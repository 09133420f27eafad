"""Disaggregation under `pdctl up`: in its state file, and as one line each."""

from pathlib import Path

import pytest

from pdcluster_api.plan.observed.state import WorkerDisaggregation
from pdctl.local.watcher import DisaggregationReporter, Row, disaggregation_of
from tests.operator.pdcluster_api.plan.clusters import make_cluster, pool

CLUSTER = make_cluster()
REFUSING = WorkerDisaggregation("tcp", (("prefill-0", "dtype differs"),), 1)
BUSY = WorkerDisaggregation("tcp", long_prompts=10, remote_ratio=1.0)


def rows(decode: WorkerDisaggregation | None, prefill: str = "ready") -> list[Row]:
    def row(role: str, state: str, said: WorkerDisaggregation | None) -> Row:
        return Row(f"{role}-0", role, "cpu", state, 7, 0, Path("/l"), {}, said)

    return [row("prefill", prefill, None), row("decode", "ready", decode)]


@pytest.mark.parametrize(
    ("said", "prefill", "expected"),
    [
        (None, "ready", ("Unknown", "NoLongPrompts")),
        (REFUSING, "ready", ("False", "PairRefused")),
        (BUSY, "ready", ("True", "Offloading")),
        (BUSY, "starting", ("False", "NoPrefillWorker")),
        (
            WorkerDisaggregation("tcp", long_prompts=10, remote_ratio=0.0),
            "failed",
            ("False", "NoPrefillWorker"),
        ),
    ],
)
def test_rows_make_the_condition(
    said: WorkerDisaggregation | None, prefill: str, expected: tuple[str, str]
) -> None:
    found = disaggregation_of(CLUSTER, rows(said, prefill))

    assert found is not None
    assert (found["status"], found["reason"]) == expected


def test_figures_stand_with_the_condition() -> None:
    found = disaggregation_of(CLUSTER, rows(BUSY))

    assert found is not None
    assert (found["remoteShare"], found["transport"]) == ("100%", "tcp")


def test_mixed_workers_have_none() -> None:
    cluster = make_cluster(mixed=(pool(1),))
    assert disaggregation_of(cluster, []) is None
    said: list[str] = []
    DisaggregationReporter(cluster, said.append).show([])
    assert said == []


def test_a_refused_pair_is_printed_once_and_so_is_its_end() -> None:
    said: list[str] = []
    news = DisaggregationReporter(CLUSTER, said.append)
    for decode in (None, BUSY, REFUSING, REFUSING, None, BUSY, BUSY):
        news.show(rows(decode))

    assert [text.partition(",")[0] for text in said] == [
        "chat: decode worker decode-0 may not use prefill worker prefill-0",
        "chat: about 100% of long prompts are prefilled by prefill workers",
    ]
