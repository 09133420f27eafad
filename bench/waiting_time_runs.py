"""The two experiments of `bench/waiting_time.py` on any server: how good forecasts are, and what is
decided by them.

`Forecasting`: groups are served one behind the other; at even times of a
group's service every estimator says when it will be complete.
`Deciding`: the queue of groups is ordered by one estimator's forecasts and
replanned at each completion; groups that return to the queue are evictions, and an
eviction is wrong where the group would have been in time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import mean
from typing import Protocol

from waiting_time_engine import Server
from waiting_time_load import Group, Job

from pdcluster_worker.routing.waiting_time.lengths import Survival
from pdcluster_worker.routing.waiting_time.load_aware import LoadAware
from pdcluster_worker.routing.waiting_time.rates import Presets
from pdcluster_worker.routing.waiting_time.request_queue import (
    Completion,
    QueuedRequest,
    QueueState,
    RequestQueue,
)
from pdcluster_worker.routing.waiting_time.rwt import RwtEstimator
from pdcluster_worker.routing.waiting_time.virtual_queue import (
    GroupKey,
    RequestGroup,
    VirtualQueue,
    by_deadline,
    replan,
)


class Forecaster(Protocol):
    """One column of the tables."""

    def observe(self, completion: Completion) -> None:
        """Learn."""
        ...

    def whole(self, members: Sequence[Job], line: Sequence[Job], elapsed: float) -> float:
        """Seconds from the start of the group's service to its end."""
        ...

    def rest(self, members: Sequence[Job], line: Sequence[Job]) -> float:
        """Seconds from now in which those members that have not ended will have."""
        ...

    def fresh(self, members: Sequence[Job]) -> float:
        """Seconds that such a group takes, were it to begin now, alone."""
        ...


class Rwt:
    """The document's: T(n) of the whole group with the parameters of the moment, or of what is left
    of it.
    """

    def __init__(
        self, presets: Presets, seats: int, *, decode: bool, output: bool, progress: bool = False
    ) -> None:
        self._estimator = RwtEstimator(presets, adapts_decode=decode, adapts_output=output)
        self._seats = seats
        self._progress = progress

    def observe(self, completion: Completion) -> None:
        """Learn."""
        self._estimator.observe(completion)

    def whole(self, members: Sequence[Job], line: Sequence[Job], elapsed: float) -> float:
        """T(n), or the time passed and T of the others."""
        return elapsed + self.rest(members, line) if self._progress else self._t(members)

    def rest(self, members: Sequence[Job], line: Sequence[Job]) -> float:
        """T of those that have not ended."""
        return self._t([job for job in members if job.ended == inf])

    def fresh(self, members: Sequence[Job]) -> float:
        """T(n)."""
        return self._t(members)

    def _t(self, members: Sequence[Job]) -> float:
        seconds = self._estimator.group_seconds([job.flight for job in members], self._seats)
        assert seconds is not None, "the presets give a time of a token"
        return seconds


class Ours:
    """`loadAware`: the time passed, and the line played forward."""

    def __init__(self, estimator: LoadAware, seats: int) -> None:
        self._estimator = estimator
        self._seats = seats

    def observe(self, completion: Completion) -> None:
        """Learn."""
        self._estimator.observe(completion)

    def whole(self, members: Sequence[Job], line: Sequence[Job], elapsed: float) -> float:
        """The time passed and the rest."""
        return elapsed + self.rest(members, line)

    def rest(self, members: Sequence[Job], line: Sequence[Job]) -> float:
        """Time when the last of them ends."""
        return self._seconds(
            [job.flight for job in members if job.ended == inf], [job.flight for job in line]
        )

    def fresh(self, members: Sequence[Job]) -> float:
        """The same requests before their first tokens."""
        flights = [replace(job.flight, num_tokens=0) for job in members]
        return self._seconds(flights, flights)

    def _seconds(self, members: Sequence[QueuedRequest], line: Sequence[QueuedRequest]) -> float:
        seconds = self._estimator.group_seconds(
            members, QueueState(RequestQueue(line), self._seats)
        )
        assert seconds is not None, "the presets give a time of a token"
        return seconds


class KnownLengths(LoadAware):
    """`loadAware` that is given the distributions which lengths are drawn from: the error that is
    left, no estimator can avoid.
    """

    def __init__(self, presets: Presets, known: Mapping[str, Survival]) -> None:
        super().__init__(presets)
        self._known = known

    def survival(self, group: str, line: QueueState) -> Survival:
        """The true one."""
        return self._known[group]


def forecasters(presets: Presets, seats: int) -> dict[str, Forecaster]:
    """The columns of the document's table 3, one that also knows the time passed, and ours."""
    return {
        "preset": Rwt(presets, seats, decode=False, output=False),
        "d_eff": Rwt(presets, seats, decode=True, output=False),
        "d_eff + mu": Rwt(presets, seats, decode=True, output=True),
        "d_eff + mu, rest": Rwt(presets, seats, decode=True, output=True, progress=True),
        "loadAware": Ours(LoadAware(presets), seats),
    }


def completion_of(job: Job, server: Server) -> Completion:
    """The measurements of a job that has ended."""
    seconds = job.ended - job.first
    batch = (server.batch_area - job.batch_area) / seconds if seconds > 0 else 1.0
    return Completion(
        job.group, job.prompt_tokens, job.output_tokens, job.prefill_seconds, seconds, batch
    )


@dataclass(slots=True)
class Forecasts:
    """All forecasts for one group: (estimator, seconds of its service, forecast of all of them);
    and the truth.

    calibrated: the forecast of each for such a group once this one is complete.
    """

    group: str
    calibrated: dict[str, float] = field(default_factory=dict)
    said: list[tuple[str, float, float]] = field(default_factory=list)
    seconds: float = 0.0

    def calibrated_error(self, name: str) -> float:
        """In per cent of the truth."""
        return 100 * abs(self.calibrated[name] - self.seconds) / self.seconds

    def mape(self, name: str, since: float = 0.0, until: float = 1.0) -> float:
        """Mean absolute error, in per cent of the truth; of forecasts made in that part of the
        service.
        """
        low, high = since * self.seconds, until * self.seconds
        errors = [
            abs(said - self.seconds) / self.seconds
            for who, at, said in self.said
            if who == name and low <= at <= high
        ]
        return 100 * mean(errors)


def forecasting(
    server: Server,
    jobs: Sequence[Job],
    columns: Mapping[str, Forecaster],
    seats: int,
    every_seconds: float,
) -> list[Forecasts]:
    """Serve all jobs in order; forecasts of each group at its start and then in even steps."""
    members: dict[str, list[Job]] = {}
    for job in jobs:
        members.setdefault(job.group, []).append(job)
    found = {group: Forecasts(group) for group in members}
    waiting, sample = list(jobs)[::-1], server.now
    while waiting or server.running:
        while waiting and len(server.running) < seats:
            server.start(waiting.pop())
        if server.now >= sample:
            sample = server.now + every_seconds
            line = [*server.running, *waiting[::-1]]
            for group, those in members.items():
                begun = min(job.started for job in those)
                if begun <= server.now and any(job.ended == inf for job in those):
                    elapsed = server.now - begun
                    found[group].said += [
                        (name, elapsed, column.whole(those, line, elapsed))
                        for name, column in columns.items()
                    ]
        for job in server.advance(sample):
            for column in columns.values():
                column.observe(completion_of(job, server))
            those = members[job.group]
            if all(member.ended < inf for member in those):
                found[job.group].calibrated = {
                    name: column.fresh(those) for name, column in columns.items()
                }
    for group, those in members.items():
        found[group].seconds = max(job.ended for job in those) - min(job.started for job in those)
    return list(found.values())


@dataclass(slots=True)
class Outcome:
    """The result of one run that decided by forecasts.

    evictions: of groups; wrong ones are those that would have been in time had the order been kept.
    """

    num_requests: int = 0
    in_time: dict[str, int] = field(default_factory=dict)
    evictions: int = 0
    wrong_evictions: int = 0

    @property
    def attainment(self) -> float:
        """Per cent of all requests whose group was complete by its deadline."""
        return 100 * sum(self.in_time.values()) / self.num_requests


class Deciding:
    """Serves groups in the order that one estimator's forecasts ask for.

    truth: seconds that a list of jobs takes from now, as only a simulation knows; None on a real
           engine.
    """

    def __init__(
        self,
        server: Server,
        column: Forecaster,
        seats: int,
        truth: Callable[[Sequence[Job]], float] | None,
    ) -> None:
        self._server = server
        self._column = column
        self._seats = seats
        self._truth = truth
        self._members: dict[str, list[Job]] = {}
        self._outcome = Outcome()

    def run(self, groups: Sequence[Group], jobs: Sequence[Job], warm: Sequence[Job]) -> Outcome:
        """warm: served before the clock of the deadlines starts."""
        waiting = list(warm)[::-1]
        while waiting or self._server.running:
            while waiting and len(self._server.running) < self._seats:
                self._server.start(waiting.pop())
            self._observe(self._server.advance(inf))
        start = self._server.now
        for group in groups:
            self._members[group.name] = [job for job in jobs if job.group == group.name]
        queue = VirtualQueue(
            "w0", "model", tuple(by_deadline([_requests(group, start) for group in groups]))
        )
        while queue.groups:
            queue = self._replanned(queue)
            self._fill(queue)
            self._observe(self._server.advance(inf))
            queue = queue.with_groups(group for group in queue.groups if self._left(group))
        self._outcome.num_requests = len(jobs)
        for group in groups:
            those = self._members[group.name]
            late = max(job.ended for job in those) > start + group.slo_seconds
            self._outcome.in_time[group.name] = 0 if late else len(those)
        return self._outcome

    def _observe(self, ended: Sequence[Job]) -> None:
        for job in ended:
            self._column.observe(completion_of(job, self._server))

    def _left(self, group: RequestGroup) -> list[Job]:
        """Running ones first."""
        return sorted(
            (job for job in self._members[group.key.model] if job.ended == inf),
            key=lambda job: job not in self._server.running,
        )

    def _replanned(self, queue: VirtualQueue) -> VirtualQueue:
        column, server = self._column, self._server
        queue = VirtualQueue(queue.worker, "", queue.groups)
        order = replan(
            queue,
            lambda group: column.rest(self._members[group.key.model], self._left(group)),
            server.now,
        )
        requeue = [group for index, group in enumerate(queue.groups) if order.index(group) > index]
        for group in requeue:
            self._evict(queue, group)
        return queue.with_groups(order)

    def _evict(self, queue: VirtualQueue, group: RequestGroup) -> None:
        self._outcome.evictions += 1
        if self._truth is not None:
            before = queue.groups[: queue.groups.index(group) + 1]
            kept = [job for other in before for job in self._left(other)]
            self._outcome.wrong_evictions += (
                self._server.now + self._truth(kept) <= group.due_seconds
            )
        for job in [job for job in self._server.running if job.group == group.key.model]:
            self._server.evict(job)

    def _fill(self, queue: VirtualQueue) -> None:
        waiting = [
            job
            for group in queue.groups
            for job in self._left(group)
            if job not in self._server.running
        ]
        for job in waiting[: self._seats - len(self._server.running)]:
            self._server.start(job)


def _requests(group: Group, start: float) -> RequestGroup:
    # The bench's groups differ by name, which stands in the place of the model: no swap takes time
    # here.
    return RequestGroup(
        GroupKey(group.name, group.slo_seconds), start + group.slo_seconds, group.num_requests
    )
