"""The type of accelerator that a workload was made for: its record says it, and when that is gone
its pods do.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from pdcluster_api.apiserver.observe import Live, observe
from pdcluster_api.plan.observed.state import DiscoveryState
from pdcluster_schema.labels import GPU, GPUS_PER_REPLICA, workload_labels
from pdcluster_schema.workload import WorkloadId
from tests.operator import bodies as made
from tests.operator.pods import worker_body

DECODE = WorkloadId(made.NAME, "decode", "first", "0123abcd")
LABELS = workload_labels(DECODE.cluster, DECODE.role, DECODE.pool, DECODE.revision)


def of_type(gpu: str | None) -> made.Body:
    return worker_body(DECODE, **({} if gpu is None else {"annotations": {GPU: gpu}}))


def record(data: Mapping[str, Any] | None) -> made.Body:
    return made.child("ControllerRevision", DECODE.name, metadata={"labels": LABELS}, data=data)


@pytest.mark.parametrize(
    ("children", "gpu"),
    [
        ([of_type("H100"), record({"pool": {"gpu": "B200"}})], "B200"),
        ([of_type("H100")], "H100"),
        ([of_type("H100"), record({"pool": {}})], "H100"),
        *(
            ([of_type("an H100"), record(data)], "an H100")
            for data in (None, {}, {"pool": None}, {"pool": "B200"})
        ),
        ([of_type(None)], ""),
    ],
)
def test_record_then_pods_say_it(children: list[made.Body], gpu: str):
    (state,) = observe(
        Live(made.cluster(), children), discovery=DiscoveryState(managed=True), faults={}
    ).workloads
    assert (state.id, state.gone, state.gpu) == (DECODE, True, gpu)


def marked(number: str | None) -> made.Body:
    marks = {} if number is None else {GPUS_PER_REPLICA: number}
    return worker_body(DECODE, annotations={GPU: "H100", **marks})


@pytest.mark.parametrize(
    ("children", "number"),
    [
        ([marked("4"), record({"pool": {"gpu": "B200", "gpusPerReplica": 8}})], 8),
        ([marked("4"), record({"pool": {"gpu": "B200"}})], 4),
        ([marked("4"), record({"pool": {"gpusPerReplica": "eight"}})], 4),
        ([marked("8")], 8),
        # numbers that no worker has
        *(([marked(text)], 0) for text in ("0", "65", "-1", "1e9", "", " 8", None)),
    ],
)
def test_the_number_of_accelerators_is_known_in_the_same_way(
    children: list[made.Body], number: int
):
    (state,) = observe(
        Live(made.cluster(), children), discovery=DiscoveryState(managed=True), faults={}
    ).workloads
    assert state.gpus_per_replica == number
