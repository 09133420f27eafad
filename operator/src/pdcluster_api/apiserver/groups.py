"""Workers of several pods, from cached bodies to one pod's state each. Pure. A worker restarts as a
whole: when one of its pods ends while others run on, none may run until all have ended.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property

from pdcluster_api.apiserver.container_ends import UNREADY_GRACE, time_of
from pdcluster_api.apiserver.group_restarts import ALL_START_AGAIN, GroupRestart, PodEnd
from pdcluster_api.apiserver.kinds import Body
from pdcluster_api.apiserver.pods import COMPUTING, condition_of, end_of, pod_state, short
from pdcluster_api.manifests.groups import GroupRun
from pdcluster_api.plan.observed.state import PodState, Problem
from pdcluster_api.plan.status.condition import worst_of
from pdcluster_schema import conditions, labels
from pdcluster_schema.ports import MAX_PODS
from pdcluster_schema.text import and_more
from pdcluster_schema.workload import GroupId, WorkloadId

_ROLE_OF = {follower: role for role, follower in labels.FOLLOWER_OF.items()}

# A pod's Ready condition has changed since the pod began, if it is later than that by more than a
# kubelet needs to write both; an end of its own made it unready, if it is not earlier than that by
# more.
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
        return all(map(_is_terminating, self.sets.values()))

    def _notes(self, key: str) -> list[str]:
        """An annotation: of the two sets, one may have been written without the other."""
        notes = ((body["metadata"].get("annotations") or {}) for body in self.sets.values())
        return [each[key] for each in notes if key in each]

    @property
    def last_restart(self) -> GroupRestart | None:
        found = map(GroupRestart.read, self._notes(labels.GROUP_RESTART))
        known = [each for each in found if each is not None]
        return max(known, key=lambda each: each.number, default=None)

    @property
    def _served(self) -> str:
        """Since when and with which pods it serves, as their annotation has it; empty = not yet."""
        known = next(iter(self._notes(labels.GROUP_PODS)), "")
        leader = self.pods.get(self.id.leader_pod)
        is_whole = len(self.pods) == self.num_pods
        if known or not is_whole or leader is None or not _is_ready(leader):
            return known
        since = str(condition_of(leader, "Ready").get("lastTransitionTime", ""))
        return " ".join((since, *sorted(map(_identity, self.pods.values()))))

    @property
    def is_at_zero(self) -> bool:
        return any(body["spec"].get("replicas") == 0 for body in self.sets.values())

    def restarting(self, now: datetime) -> "Restarting":
        """now: in UTC, without a zone"""
        last, end = self.last_restart, self._end
        if end is not None:
            served_since = time_of(self._served.partition(" ")[0])
            begun = GroupRestart.after(last, end, now, served_since)
            return Restarting(begun, is_stopped=True, is_new=True)
        if not self.is_at_zero:
            left = any(not self._has_set(pod) for pod in self.pods.values())
            return Restarting(last, is_stopped=left, served="" if left else self._served)
        wait = last.wait_seconds(now) if last is not None else 0.0
        is_stopped = bool(self.pods) or wait > 0
        return Restarting(last, is_stopped, is_new=True, wait_seconds=None if self.pods else wait)

    @property
    def _end(self) -> PodEnd | None:
        """The one for which it is to start again; None = it need not, is at it, or goes.  Any of a
        worker that has not served yet counts as a crash: it may be one of each start.
        """
        is_kept = len(self.sets) == 2 and not any(map(_is_terminating, self.sets.values()))
        end = self.broken_by if is_kept and not self.is_at_zero else None
        return end if end is None or self._served else end._replace(is_crash=True)

    def _has_set(self, pod: Body) -> bool:
        return any(_is_of(name, pod) for name in self.sets)

    @cached_property
    def broken_by(self) -> PodEnd | None:
        """The pod that is to end, or has ended or was replaced since the worker served, the first
        one; None = all run on.  What ends before it has served is the kubelet's to start again.
        """
        going = [name for name, pod in self.pods.items() if _is_terminating(pod)]
        if going and len(going) < len(self.pods):
            return PodEnd(name := min(going), _why_deleted(self.pods[name]), is_crash=False)
        leader = self.pods.get(self.id.leader_pod)
        if leader is None:
            return None
        followers = {name: pod for name, pod in self.pods.items() if pod is not leader}
        since, served = _served_since(leader), self._served.split()
        # without a note of the pods; clocks of nodes differ by less than the grace
        joined_by = since + UNREADY_GRACE if since and not self._notes(labels.GROUP_PODS) else None
        is_ready = _is_ready(leader)
        # a leader is not ready any more some time after the end that is the cause
        joined = since if since is None or is_ready else since - UNREADY_GRACE
        changed = {
            name: pod
            for name, pod in self.pods.items()
            if (served and _identity(pod) not in served)
            or (joined_by and pod is not leader and _made(pod) > joined_by)
            or (pod is not leader and joined and (at := _ended(pod)) and at > joined)
        }
        ended, margin = _ended(leader), timedelta(0) if is_ready else _BEGINNING
        has_ended = since is not None and ended is not None and ended >= since - margin
        began = [time for pod in followers.values() if (time := _running_since(pod)) is not None]
        ran_on = has_ended and any(time < ended for time in began if ended is not None)
        if ran_on or (changed and has_ended):
            changed[self.id.leader_pod] = leader
        if not changed:
            return None
        name = min(changed, key=lambda name: (_ended(changed[name]) or _made(changed[name]), name))
        return _end_of(name, changed[name])

    def state(self) -> PodState:
        """The worker as one pod, by the name of its leader."""
        states = {name: pod_state(pod) for name, pod in sorted(self.pods.items())}
        first = next(iter(states.values()))
        lead = states.get(self.id.leader_pod) or replace(first, ready=False, started=False)
        broken = self._end
        problem = self._counted(states, worst_of(each.problem for each in states.values()))
        if broken is not None:
            problem = Problem(conditions.GROUP_RESTARTING, f"{broken}; {ALL_START_AGAIN}")
        elif self.is_at_zero and (last := self.last_restart) is not None:
            problem = Problem(conditions.GROUP_RESTARTING, last.problem.message)
        is_whole = len(states) == self.num_pods and all(each.ready for each in states.values())
        return replace(
            lead,
            name=self.id.leader_pod,
            workload=self.id.workload,
            ready=is_whole and broken is None and not self.is_at_zero,
            problem=problem,
            first_ending=min(
                (each.ending for each in states.values() if each.terminating),
                key=lambda each: (each.since or "", each.name),
                default=None,
            ),
            since=lead.since or max((s.since for s in states.values() if s.since), default=None),
        )

    def _counted(self, states: Mapping[str, PodState], worst: Problem | None) -> Problem | None:
        """The problem of a pod without a node, with all of those, for which the others wait."""
        unplaced = [
            name
            for name, each in states.items()
            if not each.node and each.problem and each.problem.reason == conditions.UNSCHEDULABLE
        ]
        if worst is None or worst.reason != conditions.UNSCHEDULABLE or not unplaced:
            return worst
        number = f"{len(unplaced)} of {self.num_pods} pods of its worker have no node"
        names = ", ".join(unplaced[:3]) + and_more(len(unplaced) - 2)
        return Problem(worst.reason, f"{worst.message}; {number}: {names}")

    @property
    def held_back(self) -> Problem | None:
        """Problem of a worker that has no pods for a while, after several crashes."""
        last = self.last_restart
        is_held = self.is_at_zero and not self.pods and last is not None and last.crashes > 1
        return last.problem if last is not None and is_held else None


@dataclass(frozen=True)
class Restarting:
    """One worker, as far as it starts again as a whole."""

    last: GroupRestart | None  # its last restart, and the one that begins now
    is_stopped: bool  # it has to have no pod: until the last one of an earlier start has ended
    served: str = ""  # annotation: since when and with which pods; empty = it has not yet
    is_new: bool = False  # it has not come back from its last restart
    wait_seconds: float | None = None  # until its pods are made again; None = until others end

    @property
    def run(self) -> GroupRun:
        restart = {} if self.last is None else {labels.GROUP_RESTART: str(self.last)}
        served = {labels.GROUP_PODS: self.served} if self.served else {}
        return GroupRun(self.is_stopped, {**restart, **served})


def group_of(body: Body) -> GroupId | None:
    """Worker of several pods that a StatefulSet or a pod belongs to; None = to none."""
    marks = body["metadata"].get("labels", {})
    name, role = str(marks.get(labels.WORKER, "")), str(marks.get(labels.ROLE))
    try:
        workload = WorkloadId(
            *(marks[labels.CLUSTER], _ROLE_OF.get(role, role)),
            *(marks[labels.POOL], marks[labels.REVISION], marks.get(labels.TEMPLATE, "")),
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


def _is_terminating(body: Body) -> bool:
    return "deletionTimestamp" in body["metadata"]


def _is_ready(pod: Body) -> bool:
    return condition_of(pod, "Ready").get("status") == "True"


def _served_since(leader: Body) -> datetime | None:
    """Since when the leader is ready, or is not any more; None = it never was."""
    ready = condition_of(leader, "Ready")
    since = time_of(ready.get("lastTransitionTime"))
    began = time_of((leader.get("status") or {}).get("startTime"))
    if since is None or _is_ready(leader) or began is None:
        return since if _is_ready(leader) else None
    return since if since > began + _BEGINNING else None


def _why_deleted(pod: Body) -> str:
    """An eviction says why in a condition; a deletion by hand says nothing."""
    target = condition_of(pod, "DisruptionTarget")
    text = short(": ".join(str(target[key]) for key in ("reason", "message") if target.get(key)))
    return f"it was deleted ({text})" if text else "it was deleted"


def _end_of(name: str, pod: Body) -> PodEnd:
    ends = [
        (str(ended.get("finishedAt")), entry["name"], ended)
        for entry in _entries(pod)
        for state in ("state", "lastState")
        if (ended := (entry.get(state) or {}).get("terminated"))
    ]
    if not ends:
        return PodEnd(name, "another one took its place, so it was deleted", is_crash=False)
    _, container, ended = max(ends, key=lambda end: end[:2])
    return PodEnd(name, end_of(container, ended), is_crash=True)


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


def _identity(pod: Body) -> str:
    """By which another pod of the same name differs."""
    return str(pod["metadata"]["uid"])[:13]
