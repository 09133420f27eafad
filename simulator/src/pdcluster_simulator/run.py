"""Runs simulations: cells one after the other in each of a few processes, results put together."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from pdcluster_api.traces.requests import LoadTrace
from pdcluster_simulator.autoscaling import Decision, SimulatedAutoscaler
from pdcluster_simulator.cluster import ClusterBuilder, ClusterModel
from pdcluster_simulator.events import SimulatedTime
from pdcluster_simulator.fleet import Fleet
from pdcluster_simulator.requests import SimulatedRequest, simulated_requests
from pdcluster_simulator.results import ClusterSample, Recorder
from pdcluster_simulator.rollout import RolloutFigures
from pdcluster_simulator.steady_load import SteadyLoad
from pdcluster_simulator.workers import ClusterWorker, WorkerState

_POLL_SECONDS = 0.5
PATIENCE_SECONDS = 3600.0
"""After the last arrival: what has not ended by then is left over."""


@dataclass(frozen=True)
class Options:
    """interval: seconds between two samples, and two decisions of the autoscaler.

    start_seconds: until a new worker is ready
    rollout_at:    when workers of another revision begin to take the places of all
    repeats:       whether intervals of a steady load are repeated where it autoscales
    """

    interval: float
    autoscales: bool = False
    repeats: bool = False
    start_seconds: float = 120.0
    num_cells: int = 1
    num_processes: int = 1
    rollout_at: float | None = None


@dataclass
class Result:
    """rollout: None = none has begun"""

    recorder: Recorder
    decisions: list[Decision]
    rollout: RolloutFigures | None = None


def simulate(
    model: ClusterModel,
    trace: LoadTrace,
    options: Options,
    on_ended: Callable[[int], None] = lambda number: None,
) -> Result:
    """on_ended: called with numbers of requests that have ended since the last call."""
    parts = [trace.part(number, options.num_cells) for number in range(options.num_cells)]
    models = [replace(model, seed=f"{model.seed}/{number}") for number in range(len(parts))]
    if len(parts) == 1 or options.num_processes == 1:
        results = [
            simulate_cell(each, part, options, on_ended)
            for each, part in zip(models, parts, strict=True)
        ]
    else:
        results = list(_side_by_side(models, parts, options, on_ended))
    first = results[0]
    if len(results) > 1:
        first.recorder.merge([each.recorder for each in results[1:]])
    return first


def _side_by_side(
    models: Sequence[ClusterModel],
    parts: Sequence[LoadTrace],
    options: Options,
    on_ended: Callable[[int], None],
) -> Iterator[Result]:
    context = get_context("spawn")
    ended = context.Value("q", 0)
    with ProcessPoolExecutor(options.num_processes, context, _count_in, (ended,)) as processes:
        futures = [
            processes.submit(_counted_cell, model, part, options)
            for model, part in zip(models, parts, strict=True)
        ]
        before, left = 0, set(futures)
        while left:
            _, left = wait(left, _POLL_SECONDS, FIRST_COMPLETED)
            on_ended(ended.value - before)
            before = ended.value
        yield from (future.result() for future in futures)


_ended: Any = None
"""Number of requests that have ended, of all processes together."""


def _count_in(ended: Any) -> None:
    global _ended
    _ended = ended


def _counted_cell(model: ClusterModel, trace: LoadTrace, options: Options) -> Result:
    def add(number: int) -> None:
        with _ended.get_lock():
            _ended.value += number

    return simulate_cell(model, trace, options, add)


def simulate_cell(
    model: ClusterModel,
    trace: LoadTrace,
    options: Options,
    on_ended: Callable[[int], None] = lambda number: None,
) -> Result:
    """One cluster, in this process."""
    queue, recorder = SimulatedTime(), Recorder()
    builder = ClusterBuilder(model, queue, recorder)
    fleet, interval = Fleet(builder, options.start_seconds), options.interval
    builder.start()
    rollout_at = options.rollout_at
    autoscaler: SimulatedAutoscaler | None = None
    steady: SteadyLoad | None = None
    if options.autoscales:
        autoscaler = SimulatedAutoscaler(fleet)
        if options.repeats:
            changes = [*trace.ends] if rollout_at is None else sorted([*trace.ends, rollout_at])
            steady = SteadyLoad(recorder, autoscaler, changes, interval)
    feed = _Feed(fleet, simulated_requests(trace, model.pools[0].settings.block_size))
    before, busy = 0, dict[str, float]()
    gc.freeze()  # objects of a request are freed by their last reference
    time = 0.0
    while time < trace.seconds or (
        (feed.has_more or recorder.num_running) and time < trace.seconds + PATIENCE_SECONDS
    ):
        time += interval
        queue.run(time - recorder.repeated)
        recorder.samples.append(_sample(fleet.workers, time - interval, busy, interval))
        num_cut = fleet.advance()
        if rollout_at is not None and time >= rollout_at:
            fleet.begin_rollout(time)
            rollout_at = None
        if autoscaler is None:
            if fleet.rollout is not None:
                fleet.scale(fleet.replicas)
        else:
            scrapes = autoscaler.round(time, interval, num_cut)
            if steady is not None and (passed := steady.repeat(time, scrapes)):
                time += passed
                feed.skip(time)
        on_ended(len(recorder.end) - before)
        before = len(recorder.end)
    recorder.num_preemptions += sum(each.engine.scheduler.num_preemptions for each in fleet.workers)
    gc.unfreeze()
    decisions = [] if autoscaler is None else autoscaler.decisions
    return Result(recorder, decisions, fleet.rollout_figures)


class _Feed:
    """Lets each request arrive in its time."""

    def __init__(self, fleet: Fleet, requests: Iterator[SimulatedRequest]) -> None:
        self._fleet, self._requests = fleet, requests
        self._recorder = fleet.builder.recorder
        self._next = next(requests, None)
        self._wait()

    @property
    def has_more(self) -> bool:
        return self._next is not None

    def skip(self, begin: float) -> None:
        """Drop requests before this time of the trace, after intervals were repeated up to it."""
        while self._next is not None and self._next.arrival < begin:
            self._next = next(self._requests, None)
        self._wait()

    def _wait(self) -> None:
        if self._next is not None:
            queue, at = self._fleet.queue, self._next.arrival - self._recorder.repeated
            queue.at(max(queue.now, at), self._arrive, self._next)

    def _arrive(self, request: SimulatedRequest) -> None:
        if request is not self._next:
            return  # a repetition dropped it, or made it arrive earlier
        request.arrival -= self._recorder.repeated
        self._fleet.arrive(request)
        self._next = next(self._requests, None)
        self._wait()


def _sample(
    workers: Iterable[ClusterWorker], seconds: float, busy: dict[str, float], interval: float
) -> ClusterSample:
    """busy: seconds of each worker's engine at the sample before; renewed."""
    queued: dict[str, int] = {}
    usage: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    replicas: dict[str, int] = {}
    ready: dict[str, int] = {}
    draining: dict[str, int] = {}
    accelerators: dict[str, int] = {}
    running = 0
    for worker in workers:
        engine, role = worker.engine, worker.role
        pool = f"{role}/{worker.pool[1]}"
        running += engine.num_running
        queued[role] = queued.get(role, 0) + engine.num_waiting + worker.credit_queue.num_requests
        if worker.state is not WorkerState.STARTING:
            taken = engine.totals.busy_seconds - busy.get(worker.key, 0.0)
            busy[worker.key] = engine.totals.busy_seconds
            used = 1.0 - engine.num_free_blocks / engine.settings.num_blocks
            usage.setdefault(role, []).append(used)
            shares.setdefault(role, []).append(min(1.0, taken / interval))
        for counts, state in ((ready, WorkerState.READY), (draining, WorkerState.DRAINING)):
            counts[pool] = counts.get(pool, 0) + (worker.state is state)
        is_counted = worker.state is not WorkerState.DRAINING
        replicas[pool] = replicas.get(pool, 0) + is_counted
        accelerators[worker.gpu] = accelerators.get(worker.gpu, 0) + worker.num_gpus
    return ClusterSample(
        seconds,
        queued,
        running,
        {role: sum(each) / len(each) for role, each in usage.items()},
        {role: sum(each) / len(each) for role, each in shares.items()},
        replicas,
        ready,
        draining,
        accelerators,
    )
