"""Workers of several pods, from cached bodies to one pod's state each. Pure. A worker restarts as a
whole: when one of its pods ends while others run on, none may run until all have ended.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from pdcluster_api.apiserver.container_ends import time_of
from pdcluster_api.apiserver.kinds import Body
from pdcluster_api.apiserver.pods import COMPUTING, condition_of, pod_state
from pdcluster_api.plan.observed.state import PodState, Problem
from pdcluster_api.plan.status.condition import worst_of
from pdcluster_schema import conditions, labels
from pdcluster_schema.ports import MAX_PODS
from pdcluster_schema.workload import GroupId, WorkloadId

_ROLE_OF = {follower: role for role, follower in labels.FOLLOWER_OF.items()}

# A pod's Ready condition has changed since the pod began, if it is later than that by more than a
# kubelet needs to write both; an end made it unready, if it is not earlier than that by more. Pods
# of one start are made within that time.
_BEGINNING = timedelta(seconds=5)
_LONG_AGO = datetime.fromtimestamp(0, UTC).replace(tzinfo=None)


@dataclass
class WorkerPods:
    """The objects of one worker of several pods."""

    id: GroupId
    sets: dict[str, Body] = field(default_factory=dict)  # by name
    pods: dict[str, Body] = field(default_factory=dict)  # by name

    @property
    def num_pods(self) -> int:
        """That it should have; 0 = unknown."""
        texts = (
            (body["metadata"].get("annotations") or {}).get(labels.PODS_PER_REPLICA)
            for body in (*self.sets.values(), *self.pods.values())
        )
        return next((n for text in texts for n in range(1, MAX_PODS + 1) if str(n) == text), 0)

    @property
    def is_going(self) -> bool:
        """True if no pod of it is made any more."""
        return all("deletionTimestamp" in body["metadata"] for body in self.sets.values())

    @property
    def is_stopped(self) -> bool:
        """True if it has to have no pod: until the last one of an earlier start has ended."""
        return bool(self.pods) and (self._is_ending or self.broken_by is not None)

    @property
    def _is_ending(self) -> bool:
        for name in (self.id.leader, self.id.followers):
            body = self.sets.get(name)
            if body is None:
                if any(_is_of(name, pod) for pod in self.pods.values()):
                    return True
            elif body["spec"].get("replicas") == 0:
                return True
        return False

    @property
    def broken_by(self) -> str | None:
        """The pod that is to end, or has ended or was replaced since the worker served; None = all
        run on. What ends before it has served is the kubelet's to start again.
        """
        going = [name for name, pod in self.pods.items() if _is_terminating(pod)]
        if going and len(going) < len(self.pods):
            return min(going)
        leader = self.pods.get(self.id.leader_pod)
        if leader is None:
            return None
        followers = {name: pod for name, pod in self.pods.items() if pod is not leader}
        since, made = _served_since(leader), _made(leader)
        for name, pod in sorted(followers.items()):
            if since is not None and _has_changed(pod, since, made):
                return name
        if any(made > _made(pod) + _BEGINNING for pod in followers.values()):
            return self.id.leader_pod
        ended = _ended(leader)
        if since is None or ended is None or ended < since - _BEGINNING:
            return None
        began = [time for pod in followers.values() if (time := _running_since(pod)) is not None]
        return self.id.leader_pod if any(time < ended for time in began) else None

    def state(self) -> PodState:
        """The worker as one pod, by the name of its leader."""
        states = {name: pod_state(pod) for name, pod in sorted(self.pods.items())}
        first = next(iter(states.values()))
        lead = states.get(self.id.leader_pod) or replace(first, ready=False, started=False)
        broken = self.broken_by
        problem = worst_of(each.problem for each in states.values())
        if broken is not None:
            text = f"pod {broken} ended while others of its worker ran: all of them start again"
            problem = Problem(conditions.GROUP_RESTARTING, text)
        is_whole = len(states) == self.num_pods and all(each.ready for each in states.values())
        return replace(
            lead,
            name=self.id.leader_pod,
            workload=self.id.workload,
            ready=is_whole and broken is None,
            problem=problem,
            since=lead.since or max((s.since for s in states.values() if s.since), default=None),
        )


def group_of(body: Body) -> GroupId | None:
    """Worker of several pods that a StatefulSet or a pod belongs to; None = to none."""
    marks = body["metadata"].get("labels", {})
    name, role = str(marks.get(labels.WORKER, "")), str(marks.get(labels.ROLE))
    try:
        workload = WorkloadId(
            *(marks[labels.CLUSTER], _ROLE_OF.get(role, role)),
            *(marks[labels.POOL], marks[labels.REVISION]),
        )
    except KeyError:
        return None
    index = name.removeprefix(f"{workload.name}-")
    return GroupId(workload, int(index)) if index.isdecimal() else None


def groups_of(sets: Iterable[Body], pods: Iterable[Body]) -> dict[WorkloadId, list[WorkerPods]]:
    """By their workload, in their order.  A pod that has not an owner of the worker is none of it:
    labels can be copied.
    """
    found: dict[GroupId, WorkerPods] = {}
    for kind, bodies in (("sets", sets), ("pods", pods)):
        for body in bodies:
            identity = group_of(body)
            if identity is None or (kind == "pods" and not _is_own(identity, body)):
                continue
            group = found.setdefault(identity, WorkerPods(identity))
            getattr(group, kind)[body["metadata"]["name"]] = body
    by_workload: defaultdict[WorkloadId, list[WorkerPods]] = defaultdict(list)
    for identity in sorted(found):
        by_workload[identity.workload].append(found[identity])
    return dict(by_workload)


def _is_own(identity: GroupId, pod: Body) -> bool:
    return any(_is_of(name, pod) for name in (identity.leader, identity.followers))


def _is_of(stateful_set: str, pod: Body) -> bool:
    references = pod["metadata"].get("ownerReferences", ())
    return any((each["kind"], each["name"]) == ("StatefulSet", stateful_set) for each in references)


def _is_terminating(pod: Body) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _served_since(leader: Body) -> datetime | None:
    """Since when the leader is ready, or is not any more; None = it never was."""
    ready = condition_of(leader, "Ready")
    since = time_of(ready.get("lastTransitionTime"))
    began = time_of((leader.get("status") or {}).get("startTime"))
    if since is None or ready.get("status") == "True" or began is None:
        return since if ready.get("status") == "True" else None
    return since if since > began + _BEGINNING else None


def _entries(pod: Body) -> Iterator[Body]:
    status = pod.get("status") or {}
    for entry in (*(status.get("initContainerStatuses") or ()), *_containers(status)):
        if entry["name"] in COMPUTING:
            yield entry


def _containers(status: Body) -> tuple[Body, ...]:
    return tuple(status.get("containerStatuses") or ())


def _running_since(pod: Body) -> datetime | None:
    times = [
        time_of(((entry.get("state") or {}).get("running") or {}).get("startedAt"))
        for entry in _entries(pod)
    ]
    return max((time for time in times if time is not None), default=None)


def _ended(pod: Body) -> datetime | None:
    """Last end of one of its containers that compute; None = none has."""
    states = [entry.get(state) or {} for entry in _entries(pod) for state in ("state", "lastState")]
    times = [time_of((state.get("terminated") or {}).get("finishedAt")) for state in states]
    return max((time for time in times if time is not None), default=None)


def _made(pod: Body) -> datetime:
    return time_of(pod["metadata"].get("creationTimestamp")) or _LONG_AGO


def _has_changed(follower: Body, since: datetime, leader_made: datetime) -> bool:
    """True if it has ended, or is another pod, since its worker served.  A pod's creation is by the
    API server's clock, and `since` by that of the leader's node.
    """
    ended, made = _ended(follower), _made(follower)
    is_another = made > max(since, leader_made) + _BEGINNING
    return is_another or (ended is not None and ended > since)
