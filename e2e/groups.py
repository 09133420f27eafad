"""Workers of two pods on the test cluster: mixed ones of the object that all tests use."""

from e2e.harness import LOOK_SECONDS, NAME, READY_SECONDS, Json, Kubernetes, ready
from tests.system.waiting import wait_for

LEADER, FOLLOWER = "pdcluster.io/role=mixed", "pdcluster.io/role=mixed-follower"
SCALER = f"pdps/{NAME}-mixed-cpu"
TWO_PODS: Json = {"name": "cpu", "gpu": "cpu", "replicas": 1, "podsPerReplica": 2}


def wait_for_groups(
    cluster: Kubernetes,
    number: int,
    *,
    gone: set[str] | None = None,
    seconds: float = READY_SECONDS,
) -> None:
    """Wait until so many workers are there, with all of their pods ready, and none is left over.

    gone: uids of pods that must not be there any more
    """

    def is_there() -> bool:
        pods = every_pod(cluster)
        status = cluster.get(f"pdc/{NAME}").get("status", {})
        return (
            (len(pods), len(ready(pods))) == (2 * number, 2 * number)
            and not (gone or set()) & uids(pods)
            and status.get("decode") == f"{number}/{number}"
            and cluster.is_ready()
        )

    wait_for(
        is_there,
        seconds,
        lambda: cluster.kubectl("get", "pods,statefulsets,pdc"),
        poll_seconds=LOOK_SECONDS,
    )


def every_pod(cluster: Kubernetes) -> list[Json]:
    """The pods of all workers, those that are ending among them."""
    selector = f"pdcluster.io/cluster={NAME},pdcluster.io/worker"
    pods: list[Json] = cluster.get("pods", f"--selector={selector}")["items"]
    return pods


def uids(pods: list[Json]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def addresses(cluster: Kubernetes) -> set[str]:
    """Those that the Service leads to."""
    slices = cluster.get("endpointslices", f"--selector=kubernetes.io/service-name={NAME}")["items"]
    return {a for part in slices for each in part["endpoints"] for a in each["addresses"]}


def restart_notes(cluster: Kubernetes) -> list[str]:
    """Notes of the events of restarted groups."""
    events = cluster.get("events.events.k8s.io")["items"]
    return [event["note"] for event in events if event["reason"] == "GroupRestarting"]
