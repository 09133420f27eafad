"""The plan of one machine."""

from dataclasses import astuple
from typing import Any

import pytest

from pdcluster_schema.engine import MAX_THREADS
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse
from pdctl.local.plan import MAX_PROCESSES, plan_local
from tests.schema.object_cases import vllm


def two_by_two(document: dict[str, Any]) -> dict[str, Any]:
    document["spec"]["roles"] = {
        "prefill": {
            "pools": [{"name": "a", "replicas": 1}, {"name": "b", "replicas": 1}],
            "engine": {"threads": 3},
        },
        "decode": {"pools": [{"name": "cpu", "replicas": 2}]},
    }
    return document


def test_plan_lists_every_process(document: dict[str, Any]) -> None:
    plan = plan_local(parse(two_by_two(document)), cores=8, port=8000)

    assert [
        (p.name, p.role, p.pool.name, p.ordinal, p.engine.threads, p.http_port)
        for p in plan.processes
    ] == [
        ("chat-prefill-a-0", "prefill", "a", 0, 3, 0),
        ("chat-prefill-b-0", "prefill", "b", 0, 3, 0),
        ("chat-decode-cpu-0", "decode", "cpu", 0, 2, 8000),
        ("chat-decode-cpu-1", "decode", "cpu", 1, 2, 0),
    ]
    assert plan.ingress is plan.processes[2]


def test_plan_of_mixed_serves_at_the_first(document: dict[str, Any]) -> None:
    document["spec"]["roles"] = {
        "mixed": {"pools": [{"name": "off", "replicas": 0}, {"name": "cpu", "replicas": 1}]}
    }
    plan = plan_local(parse(document), cores=2, port=0)

    assert [(p.name, p.engine.threads) for p in plan.processes] == [("chat-mixed-cpu-0", 2)]
    assert plan.ingress.name == "chat-mixed-cpu-0"


def test_plan_gives_every_process_a_thread(document: dict[str, Any]) -> None:
    plan = plan_local(parse(document), cores=1, port=0)

    assert {p.engine.threads for p in plan.processes} == {1}


def test_plan_gives_no_process_more_threads_than_a_spec_may(document: dict[str, Any]) -> None:
    plan = plan_local(parse(document), cores=4096, port=0)

    assert {p.engine.threads for p in plan.processes} == {MAX_THREADS}


@pytest.mark.parametrize(("cores", "owned"), [(9, False), (10, True)])
def test_processes_own_their_cores_where_all_threads_have_one(
    document: dict[str, Any], cores: int, owned: bool
) -> None:
    document = two_by_two(document)
    document["spec"]["engine"] = {"threads": 2}
    plan = plan_local(parse(document), cores=cores, port=0)

    assert [p.engine.threads for p in plan.processes] == [3, 3, 2, 2]
    assert {p.owns_cores for p in plan.processes} == {owned}


def shares(document: dict[str, Any], cores: int) -> list[tuple[int, tuple[int, ...], int] | None]:
    """Place, threads and cores of each process."""
    processes = plan_local(parse(document), cores=cores, port=0).processes
    return [shared and astuple(shared) for shared in (p.shared_cores for p in processes)]


def test_workers_of_a_machine_share_its_cores(document: dict[str, Any]) -> None:
    assert shares(document, 2) == [(0, (1, 1), 2), (1, (1, 1), 2)]
    assert shares(document, 5) == [(0, (2, 2), 5), (1, (2, 2), 5)]
    assert shares(document, 1) == [None, None]  # they share one already
    document["spec"]["roles"]["decode"]["pools"][0]["replicas"] = 2
    assert shares(document, 2) == [None, None, None]
    assert shares(document, 4)[2] == (2, (1, 1, 1), 4)


def test_stock_engines_share_nothing(document: dict[str, Any]) -> None:
    vllm()(document)
    assert shares(document, 8) == [None, None]


def test_workers_whose_threads_the_file_gives_share_nothing(document: dict[str, Any]) -> None:
    assert shares(two_by_two(document), 10) == [None, None, (0, (2, 2), 4), (1, (2, 2), 4)]


@pytest.mark.parametrize(
    "engine", [{"dataParallelSize": 2}, {"tensorParallelSize": 2}, {"pipelineParallelSize": 2}]
)
def test_engines_of_several_processes_share_nothing(
    document: dict[str, Any], engine: dict[str, Any]
) -> None:
    document["spec"]["roles"]["prefill"]["engine"] = engine
    assert shares(document, 8) == [None, (0, (4,), 4)]


def test_plan_takes_as_many_processes_as_a_machine_should_run(document: dict[str, Any]) -> None:
    document["spec"]["roles"]["decode"]["pools"][0]["replicas"] = MAX_PROCESSES - 1

    assert len(plan_local(parse(document), cores=1, port=0).processes) == MAX_PROCESSES


@pytest.mark.parametrize(
    "size", [{"podsPerReplica": 2, "gpusPerReplica": 16}, {"gpusPerPod": 8}], ids=list
)
def test_a_worker_of_several_pods_is_refused_by_its_field(
    document: dict[str, Any], size: dict[str, int]
) -> None:
    vllm()(document)
    pool = {"name": "big", "gpu": "H200", "replicas": 1, **size}
    document["spec"]["roles"]["decode"] = {"pools": [pool], "engine": {"tensorParallelSize": 16}}
    with pytest.raises(InvalidObjectError) as refused:
        plan_local(parse(document), cores=8, port=0)

    field = next(iter(size))
    assert [str(fault) for fault in refused.value.faults] == [
        f"spec.roles.decode.pools[0].{field}: a worker of pool big would be 2 pods, and there are "
        f"no pods here: a worker is one process of this machine; leave {field} out, with ranks "
        "that one machine holds, or apply the file to Kubernetes"
    ]


def test_variables_over_the_gpus_of_a_worker_are_refused(document: dict[str, Any]) -> None:
    vllm(env=[{"name": "A", "value": "1"}, {"name": "CUDA_VISIBLE_DEVICES", "value": "0"}])(
        document
    )
    own = {"env": [{"name": "CUDA_DEVICE_ORDER", "value": "FASTEST_FIRST"}]}
    document["spec"]["roles"]["decode"]["engine"] = own
    with pytest.raises(InvalidObjectError) as refused:
        plan_local(parse(document), cores=8, port=0)

    why = "is set by pdctl up, which gives each worker GPUs of its own; remove it, and set "
    assert [str(fault) for fault in refused.value.faults] == [
        f"{path}.name: {name} {why}CUDA_VISIBLE_DEVICES of pdctl up to bound what they get"
        for path, name in (
            ("spec.engine.env[1]", "CUDA_VISIBLE_DEVICES"),
            ("spec.roles.decode.engine.env[0]", "CUDA_DEVICE_ORDER"),
        )
    ]
