"""Small clusters, traces and step times to simulate."""

from collections.abc import Sequence
from typing import Any

from pdcluster_api.traces.requests import LoadTrace, TraceRequest
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_simulator.cluster import ClusterModel, cluster_model
from pdcluster_simulator.run import Options, Result, simulate
from pdcluster_simulator.step_model import FORMAT, StepModel

TimedRequest = tuple[float, int, int]
"""Its second, and the tokens of its prompt and answer."""


def apart(found: list[TimedRequest]) -> list[TimedRequest]:
    """In order, and none at the end of a step, where either may go first."""
    return [
        (at / 1e4 + 3.7e-7 * (number + 1), prompt, output)
        for number, (at, prompt, output) in enumerate(sorted(found))
    ]


def make_times(**changes: Any) -> StepModel:
    """10 ms a step, and 0.1 ms for each token."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "model": "tiny",
        "gpu": "H100",
        "machine": "a table",
        "source": "made up",
        "rows": ((1, 0.0101), (1001, 0.1101)),
        "kv_bytes": 1000.0,
        "transfer_bytes": 1e7,
    }
    return StepModel(**fields | changes)


def make_cluster(
    roles: dict[str, int] | None = None,
    engine: dict[str, Any] | None = None,
    **sections: Any,
) -> PDCluster:
    """roles: replicas; a prefill and a decode worker, with 40 blocks of 16 tokens each."""
    sizes = {"numBlocks": 40, "maxBatchedTokens": 64, "maxSequences": 8, "maxModelLen": 512}

    def pools(role: str, replicas: int) -> dict[str, Any]:
        gpu = {} if role == "router" else {"gpu": "H100", "maxReplicas": 8}
        return {"pools": [{"name": "x", "replicas": replicas, **gpu}]}

    roles = {"prefill": 1, "decode": 1} if roles is None else roles
    spec = {
        "model": {"name": "tiny", "path": "/models/tiny"},
        "roles": {role: pools(role, replicas) for role, replicas in roles.items()},
        "engine": {**sizes, **(engine or {})},
        **sections,
    }
    document = {"apiVersion": "pdcluster.io/v1alpha1", "kind": "PDCluster", "spec": spec}
    return parse({**document, "metadata": {"name": "small"}})


def make_trace(*requests: tuple[float, int, int]) -> LoadTrace:
    """Each: its second, and the tokens of its prompt and answer."""
    return LoadTrace([TraceRequest(*each) for each in requests])


def make_model(
    trace: LoadTrace, cluster: PDCluster | None = None, times: StepModel | None = None
) -> ClusterModel:
    cluster, times = cluster or make_cluster(), times or make_times()
    roles = cluster.spec.roles.computing()
    by_pool = {(role, pool.name): times for role, each in roles.items() for pool in each.pools}
    return cluster_model(cluster, by_pool, trace)


def run(
    trace: LoadTrace,
    cluster: PDCluster | None = None,
    times: StepModel | None = None,
    **options: Any,
) -> Result:
    return simulate(make_model(trace, cluster, times), trace, Options(5.0, **options))


def latencies(result: Result) -> Sequence[tuple[float, float]]:
    """(TTFT, end) of each request, in the order of their ends."""
    recorder = result.recorder
    return list(zip(recorder.ttft, recorder.end, strict=True))
