"""Delete the pods of lost nodes, where the chart's `deleteLostPods` gives the right to.  Kubernetes
does it where the Node is gone or is marked `out-of-service`; while the node is only unreachable, a
StatefulSet waits for its pod indefinitely.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError, UnavailableError
from pdcluster_api.apiserver.kinds import NODE, POD, Body
from pdcluster_api.apiserver.observe import Live
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_api.plan.result import PlannedEvent
from pdcluster_schema import conditions

logger = logging.getLogger(__name__)
UNREACHABLE = "node.kubernetes.io/unreachable"
LOST_TAINTS = frozenset({UNREACHABLE, "node.kubernetes.io/out-of-service"})
CHECK_SECONDS = 20.0  # until a node that answers is looked at again


@dataclass(frozen=True)
class Deleted:
    events: tuple[PlannedEvent, ...] = ()
    failures: tuple[WriteFailure, ...] = ()
    requeue_after_seconds: float | None = None  # a pod is left that ends, or whose node answers


@dataclass(frozen=True)
class LostPods:
    client: ApiClient
    may_delete: bool
    clock: Callable[[], float] = time.monotonic
    # since when each node is lost that pods end on, None = it answers; with the time of that look
    _looks: dict[str, tuple[float, str | None]] = field(default_factory=dict)

    async def nodes(self, live: Live) -> Mapping[str, str]:
        """Unreachable nodes of pods that end, and since when each is.  Raises UnavailableError."""
        if not self.may_delete:
            return {}
        pods = (body for body in live.children if _is_ending(body))
        names = {body["spec"]["nodeName"] for body in pods if body["spec"].get("nodeName")}
        found = {name: await self._lost_since(name) for name in sorted(names)}
        return {name: since for name, since in found.items() if since is not None}

    async def _lost_since(self, name: str) -> str | None:
        now = self.clock()
        for each in [each for each, (at, _) in self._looks.items() if now - at >= CHECK_SECONDS]:
            del self._looks[each]
        if name not in self._looks:
            try:
                node = await self.client.find(NODE, "", name)
            except UnavailableError:
                raise
            except ClusterError as e:
                logger.warning("node of a pod that ends not read node=%s error=%s", name, e)
                node = None
            self._looks[name] = now, unreachable_since(node)
        return self._looks[name][1]

    async def delete(self, live: Live, names: Collection[str]) -> Deleted:
        """Delete pods that should have ended long ago, or whose node has been lost for long, if the
        API server has given it up.  Raises UnavailableError.

        names: of terminating pods
        """
        if not self.may_delete:
            return Deleted()
        events, failures, is_left = list[PlannedEvent](), list[WriteFailure](), False
        for body in live.children:
            name = body["metadata"]["name"]
            if body["kind"] != POD.name or name not in names or is_deleted(body):
                is_left |= _is_ending(body)
                continue
            try:
                is_gone = await self._delete(body)
            except UnavailableError:
                raise
            except ClusterError as e:
                logger.warning("lost pod not deleted pod=%s error=%s", name, e)
                fix = "; deleteLostPods of the chart gives the right to"
                failures.append(WriteFailure(f"Pod {name}", e.reason, f"{e}{fix}"))
                continue
            is_left |= not is_gone
            if is_gone:
                events.append(_event(body))
        return Deleted(tuple(events), tuple(failures), CHECK_SECONDS if is_left else None)

    async def _delete(self, pod: Body) -> bool:
        """Return whether the pod went: its node is lost."""
        metadata, node_name = pod["metadata"], pod["spec"].get("nodeName")
        node = await self.client.find(NODE, "", node_name) if node_name else None
        if not is_lost(node):
            return False
        namespace, name, uid = (metadata[key] for key in ("namespace", "name", "uid"))
        await self.client.delete(POD, namespace, name, uid=uid, grace_seconds=0)
        logger.info("lost pod deleted pod=%s/%s node=%s", namespace, name, node_name)
        return True


def _is_ending(body: Body) -> bool:
    is_going = body["metadata"].get("deletionTimestamp") is not None
    return body["kind"] == POD.name and is_going and not is_deleted(body)


def is_deleted(pod: Body) -> bool:
    """Return whether it was deleted without a grace period: only finalizers of others keep it."""
    seconds: int | None = pod["metadata"].get("deletionGracePeriodSeconds")
    return seconds == 0


def unreachable_since(node: Body | None) -> str | None:
    """Time at which the API server found that it no longer answers; None = it does, or is no longer
    there: then Kubernetes deletes its pods itself.
    """
    taints = () if node is None else node.get("spec", {}).get("taints") or ()
    times = [
        str(each["timeAdded"])
        for each in taints
        if each["key"] == UNREACHABLE and each.get("timeAdded")
    ]
    return min(times, default=None)


def is_lost(node: Body | None) -> bool:
    """None = the API server has no such node.

    >>> is_lost({"spec": {"taints": [{"key": "node.kubernetes.io/unreachable"}]}})
    True
    >>> is_lost({"spec": {"taints": [{"key": "node.kubernetes.io/not-ready"}]}})
    False
    """
    return node is None or any(
        taint["key"] in LOST_TAINTS for taint in node.get("spec", {}).get("taints") or ()
    )


def _event(pod: Body) -> PlannedEvent:
    name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
    place = f"its node {node} is lost" if node else "it is on no node"
    text = f"pod {name} has not ended, and {place}: deleted, so that another one takes its place"
    return PlannedEvent(conditions.LOST_POD_DELETED, text, warning=True)
