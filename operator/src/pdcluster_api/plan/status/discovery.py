"""The condition DiscoveryReady: etcd answers, has room, and has its members.  Pure."""

from collections.abc import Collection

from pdcluster_api.plan.observed.ending import node_lost
from pdcluster_api.plan.observed.state import DiscoveryState, Problem
from pdcluster_api.plan.status.condition import Condition
from pdcluster_api.plan.status.problems import worst_of
from pdcluster_schema import conditions as words


def discovery_answers(discovery: DiscoveryState) -> bool:
    return discovery.error is None and (
        not discovery.managed or discovery.ready >= discovery.desired // 2 + 1
    )


def discovery_condition(discovery: DiscoveryState, lost: Collection[str] = ()) -> Condition:
    """An etcd that only just starts is not yet one that cannot be reached."""
    members = f"{discovery.ready} of {discovery.desired} etcd members are ready"
    if discovery.is_full and discovery_answers(discovery):
        return Condition.false(words.DISCOVERY_READY, words.ETCD_FULL, _full(discovery))
    if discovery.managed and discovery.ready < discovery.desired:
        reason, problem = _problem(discovery, lost) or (words.STARTING, discovery.error)
        answers = "it answers all the same" if discovery_answers(discovery) else None
        message = "; ".join(part for part in (members, problem, answers) if part)
        return Condition.false(words.DISCOVERY_READY, reason, message)
    if discovery.error is not None:
        message = (
            f"{discovery.error}; workers that know each other go on, new ones wait until it answers"
        )
        return Condition.false(words.DISCOVERY_READY, words.ETCD_UNREACHABLE, message)
    message = members if discovery.managed else "etcd answers"
    return Condition.true(words.DISCOVERY_READY, words.ETCD_ANSWERS, message)


def _problem(discovery: DiscoveryState, lost: Collection[str]) -> Problem | None:
    """Cause for which a member that we run is not ready; None = it is just starting."""
    found = (
        discovery.problem,
        node_lost(pod for pod in discovery.ending if pod.name in lost),
    )
    worst = worst_of(each for each in found if each is not None)
    if worst is not None or not discovery.ending:
        return worst
    return Problem(words.STARTING, f"{min(map(str, discovery.ending))} is still ending")


def _full(discovery: DiscoveryState) -> str:
    if discovery.in_memory:
        fix = "delete its pod: workers register again in the next one"
    elif discovery.managed:
        inside = "kubectl exec POD -c etcd -- etcdctl"
        fix = f"of each member `{inside} defrag`, then `{inside} alarm disarm`"
    else:
        fix = "remove keys that are not needed, then `etcdctl compact`, `defrag` and `alarm disarm`"
    return (
        "etcd has no room (alarm NOSPACE), so no worker can register and none can be drained; "
        f"workers that know each other go on; {fix}"
    )
