"""Workers of flexible pools change their role in a simulated cluster, as the operator decides."""

from pdcluster_schema.pdcluster import PDCluster
from pdcluster_simulator.run import Result
from tests.simulator.small_clusters import TimedRequest, make_cluster, make_trace, run

REMOTE = {"offload": {"prefillLengthThreshold": 8}}
ANSWERS = (40, 60)  # tokens of a prompt and of its answer


def flexible_cluster(is_flexible: bool = True) -> PDCluster:
    """Three prefill workers and one of decode, and no accelerator more."""
    found = make_cluster(
        {"prefill": 3, "decode": 1},
        routing=REMOTE,
        autoscale={
            "mode": "On",
            "budget": {"total": 4},
            "decode": {"kvUsageUp": 0.5, "kvUsageDown": 0.2},
        },
    )
    roles = found.spec.roles
    changed = {
        name: role.model_copy(
            update={
                "pools": tuple(
                    pool.model_copy(update={"flexible": is_flexible}) for pool in role.pools
                )
            }
        )
        for name, role in roles.computing().items()
    }
    spec = found.spec.model_copy(update={"roles": roles.model_copy(update=changed)})
    return found.model_copy(update={"spec": spec})


def load(begin: float, end: float, rate: float, tokens: tuple[int, int]) -> list[TimedRequest]:
    number = int((end - begin) * rate)
    return [(begin + each / rate, *tokens) for each in range(number)]


def simulated(cluster: PDCluster, *requests: TimedRequest) -> Result:
    trace = make_trace(*requests)
    result = run(trace, cluster, autoscales=True, start_seconds=60.0)
    assert result.recorder.outcomes == {"complete": len(requests)}
    return result


def ready(result: Result, pool: str) -> list[int]:
    return [sample.ready[pool] for sample in result.recorder.samples]


def flips(result: Result) -> list[int]:
    """Workers of prefill that serve decode, after each decision that changed something."""
    records = [each.record for each in result.decisions if each.record is not None]
    return [record.flipped.workers if record.flipped else 0 for record in records]


def test_workers_change_their_role_and_back_without_a_failed_request():
    requests = [*load(0, 300, 8, ANSWERS), *load(300, 1200, 0.2, ANSWERS)]
    result = simulated(flexible_cluster(), *requests)
    assert max(flips(result)) >= 1
    assert flips(result)[-1] == 0
    assert max(ready(result, "decode/x")) >= 2
    for sample in result.recorder.samples:
        assert sum(sample.accelerators.values()) <= 4
        assert sum(sample.ready.values()) <= 4


def test_role_gets_a_worker_sooner_than_by_a_smaller_and_a_greater_pool():
    requests = load(0, 600, 8, ANSWERS)

    def grown(is_flexible: bool) -> int:
        sizes = ready(simulated(flexible_cluster(is_flexible), *requests), "decode/x")
        return next(number for number, size in enumerate(sizes) if size == 2)

    assert grown(is_flexible=True) < grown(is_flexible=False)
