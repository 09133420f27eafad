"""KVTiersAvailable: whether the tiers below the KV blocks take and give blocks, by the records of
the workers. Pure. Ready does not follow from it: a prefix that no tier has is computed again.
"""

from collections.abc import Iterator, Sequence

from pdcluster_api.plan.observed.pools import RoleView
from pdcluster_api.plan.observed.state import Previous, WorkerRecords
from pdcluster_api.plan.status.condition import Condition
from pdcluster_schema import conditions as words
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.sections import ENGINELESS
from pdcluster_schema.text import and_more

_TYPE = words.KV_TIERS_AVAILABLE


def kv_tiers_available(
    cluster: PDCluster,
    views: Sequence[RoleView],
    records: WorkerRecords | None,
    previous: Previous,
) -> Condition | None:
    """None = no role has a tier.  While etcd does not answer it stays as it was."""
    tiered = [
        view
        for view in views
        if view.name not in ENGINELESS and cluster.spec.engine_of(view.name).kv_tiers
    ]
    if not tiered:
        return None
    if records is None or records.error is not None:
        nothing = "etcd, where workers say how their tiers are, has not answered yet"
        return Condition.kept(previous, _TYPE) or Condition.unknown(_TYPE, words.STARTING, nothing)
    ready = sorted(pod for view in tiered for pod in _ready_pods(view) if pod in records.states)
    if not ready:
        return Condition.unknown(_TYPE, words.STARTING, "no worker with tiers is ready")
    stopped = [
        f"the {tier} tier of {pod} does not work: {reason}"
        for pod in ready
        for tier, reason in records.stopped_tiers.get(pod, ())
    ]
    if not stopped:
        return Condition.true(_TYPE, words.AS_DECLARED, "the tiers of all ready workers work")
    text = (
        f"{stopped[0]}{and_more(len(stopped))}; its prefixes are computed again, and it "
        "is tried again by itself: free the disk, lower size of engine.kvTiers, or see that the "
        "shared store answers"
    )
    return Condition.false(_TYPE, words.KV_TIER_STOPPED, text)


def _ready_pods(view: RoleView) -> Iterator[str]:
    for pool in view.pools:
        states = [state for state in (pool.target, pool.shown) if state is not None]
        for pod in {pod.name: pod for state in states for pod in state.pods}.values():
            if pod.ready and not pod.terminating:
                yield pod.name
