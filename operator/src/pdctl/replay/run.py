"""Runs a trace through the autoscaler: load, scrape, decide, interval after interval.

Only the cluster is simulated; a decision takes effect in the next interval.  Second 0 is midnight
UTC between a Sunday and a Monday, for schedules.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from pdcluster_api.errors import InvalidTraceError
from pdcluster_api.plan.autoscale.decide import decide
from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_api.plan.autoscale.rules import MAX_ROUNDS
from pdcluster_api.plan.autoscale.values import Clock, Memory, Outcome, PoolSample, WorkerSample
from pdcluster_api.plan.observed.state import ScalingDecision
from pdcluster_schema.faults import Fault, InvalidObjectError
from pdcluster_schema.latency import LATENCY_BUCKETS
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.workload import PoolKey
from pdctl.replay.pools import SimulatedPool, SimulatedWorker, scale_pools
from pdctl.replay.queueing import DecodePhase, PrefillPhase, Speeds, share_of_first
from pdctl.replay.trace import Trace, TraceLoad

MIDNIGHT = datetime(2026, 1, 5, tzinfo=UTC)
MAX_INTERVALS = 500_000


@dataclass(frozen=True)
class PoolMoment:
    """replicas: requested during the interval; accelerators: held by its workers."""

    role: str
    gpu: str
    replicas: int
    ready: int
    draining: int
    accelerators: int


@dataclass(frozen=True)
class Moment:
    """One interval, as it ended; latencies in seconds, None = nothing was served.

    demand:               busy workers that the load needs, by role, of the first pool's kind
    engine_busy_ratio:    mean of the prefill workers
    kv_cache_usage_ratio: mean of the decode workers
    over:                 roles with a signal over its threshold
    record:               the decision, where it changed replicas
    num_cut:              streams that `drainTimeoutSeconds` cut
    """

    load: TraceLoad
    demand: Mapping[str, float]
    pools: Mapping[PoolKey, PoolMoment]
    prefill_queue_requests: float
    engine_busy_ratio: float
    num_requests_waiting: float
    kv_cache_usage_ratio: float
    ttft_seconds: float | None
    tpot_seconds: float | None
    over: frozenset[str]
    record: ScalingDecision | None
    problems: tuple[str, ...]
    num_cut: float


@dataclass
class _Simulation:
    spec: PDClusterSpec
    pools: Sequence[SimulatedPool]
    prefill: PrefillPhase
    decode: DecodePhase
    speeds: Speeds
    windows: dict[PoolKey, deque[PoolSample]] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)

    def of(self, role: str) -> Sequence[SimulatedPool]:
        return [pool for pool in self.pools if pool.role == role]


def replay(spec: PDClusterSpec, trace: Trace, speeds: Speeds) -> Iterator[Moment]:
    """Every interval of the trace; `autoscale.mode` is ignored.

    Raises InvalidObjectError for the role mixed, InvalidTraceError for too many intervals.
    """
    interval = float(spec.autoscale.interval_seconds)
    if spec.roles.mixed is not None:
        fix = "give the roles prefill and decode"
        raise InvalidObjectError(
            [
                Fault(
                    "spec.roles.mixed",
                    "cannot be replayed: the simulated cluster has two phases",
                    fix,
                )
            ]
        )
    if trace.duration_seconds > MAX_INTERVALS * interval:
        reason = (
            f"lasts {trace.duration_seconds:g} s: at most {MAX_INTERVALS} intervals of "
            f"{interval:g} s are replayed"
        )
        raise InvalidTraceError(
            [Fault("", reason, "cut the trace, or raise autoscale.intervalSeconds")]
        )
    return _moments(_simulation(spec, speeds), trace, interval)


def _moments(scene: _Simulation, trace: Trace, interval: float) -> Iterator[Moment]:
    for load in trace.every(interval):
        yield _moment(scene, load, interval)


def _simulation(spec: PDClusterSpec, speeds: Speeds) -> _Simulation:
    pools = [
        SimulatedPool(
            role,
            pool.name,
            pool.gpu,
            share_of_first(spec, role, pool),
            pool.replicas,
            spec.gpus_per_replica(role, pool),
        )
        for role, declared in spec.roles.computing().items()
        for pool in declared.pools
    ]
    first = spec.roles.present()["decode"].pools[0]
    decode = DecodePhase(speeds, spec.engine_of("decode").sized_for(first.gpu).max_sequences)
    return _Simulation(spec, pools, PrefillPhase(speeds), decode, speeds)


def _moment(scene: _Simulation, load: TraceLoad, interval: float) -> Moment:
    limit = scene.spec.rollout.drain_timeout_seconds
    cut = sum(pool.advance(load.seconds, scene.speeds.start_seconds, limit) for pool in scene.pools)
    prompts = scene.prefill.serve(load, scene.of("prefill"), interval)
    scene.decode.serve(prompts, scene.of("decode"), interval)
    before = {pool.key: _pool_moment(pool) for pool in scene.pools}
    outcome = _decided(scene, load, interval)
    scale_pools(scene.pools, outcome.decision.replicas, load.seconds + interval)
    return Moment(
        load=load,
        demand=_demand(scene, load),
        pools=before,
        prefill_queue_requests=scene.prefill.num_requests,
        engine_busy_ratio=scene.prefill.engine_busy_ratio,
        num_requests_waiting=scene.decode.num_requests_waiting,
        kv_cache_usage_ratio=_kv_usage(scene),
        ttft_seconds=scene.prefill.ttft_seconds,
        tpot_seconds=_tpot(scene),
        over=frozenset(
            each.subject
            for each in outcome.decision.inputs
            if each.value is not None and each.limit is not None and each.value > each.limit
        ),
        record=outcome.decision if outcome.changed else None,
        problems=tuple(sorted({problem.reason for problem in outcome.decision.problems})),
        num_cut=cut,
    )


def _pool_moment(pool: SimulatedPool) -> PoolMoment:
    facts = pool.facts()
    return PoolMoment(
        pool.role,
        pool.gpu,
        pool.replicas,
        facts.ready,
        facts.ending,
        facts.current * pool.gpus_per_replica,
    )


def _decided(scene: _Simulation, load: TraceLoad, interval: float) -> Outcome:
    for key, sample in scraped(scene.pools, scene.prefill, scene.decode, load, interval).items():
        scene.windows.setdefault(key, deque(maxlen=MAX_ROUNDS)).append(sample)
    now = load.seconds + interval
    clock = Clock(now, MIDNIGHT + timedelta(seconds=now))
    outcome = decide(
        scene.spec, [pool.facts() for pool in scene.pools], scene.windows, scene.memory, clock
    )
    scene.memory = outcome.memory
    return outcome


def _demand(scene: _Simulation, load: TraceLoad) -> Mapping[str, float]:
    """Prefill: prompt tokens a second over the speed; decode: by Little's law, the share of a KV
    cache or of a batch.
    """
    speeds = scene.speeds
    prefill = load.requests_per_second * load.input_tokens / speeds.prefill_tokens_per_second
    full = min(
        scene.decode.max_sequences,
        speeds.kv_tokens / max(1.0, load.input_tokens + load.output_tokens / 2.0),
    )
    seconds = load.output_tokens * (
        speeds.step_seconds + speeds.stream_seconds * max(0.0, full - 1.0)
    )
    return {
        "prefill": prefill,
        "decode": load.requests_per_second * seconds / full if full > 0.0 else 0.0,
    }


def _kv_usage(scene: _Simulation) -> float:
    usages = [scene.decode.usage(worker) for pool in scene.of("decode") for worker in pool.ready()]
    return sum(usages) / len(usages) if usages else 0.0


def _tpot(scene: _Simulation) -> float | None:
    """Mean over streams."""
    found = [
        (worker.streams.number, scene.decode.step_seconds(worker, pool.speed))
        for pool in scene.of("decode")
        for worker in pool.workers
        if not worker.streams.is_done
    ]
    weight = sum(number for number, _ in found)
    return sum(number * seconds for number, seconds in found) / weight if weight else None


def scraped(
    pools: Sequence[SimulatedPool],
    prefill: PrefillPhase,
    decode: DecodePhase,
    load: TraceLoad,
    seconds: float,
) -> Mapping[PoolKey, PoolSample]:
    """The prefill queue is reported by decode workers, where requests wait for credits: it is seen
    without prefill workers too.
    """
    now = load.seconds + seconds
    num_ingress = sum(len(pool.ready()) for pool in pools if pool.role == "decode")
    found = {}
    for pool in pools:
        if pool.role == "prefill":
            workers = [
                _prefill(_name(pool, worker), pool.speed, prefill) for worker in pool.ready()
            ]
        else:
            workers = [
                _decode(
                    _name(pool, worker),
                    worker,
                    (prefill, decode),
                    (load, seconds, num_ingress),
                )
                for worker in pool.ready()
            ]
        ordered = tuple(sorted(workers, key=lambda worker: worker.pod))
        is_ingress = pool.role == "decode"
        latencies = _latencies(pool, prefill, decode, num_ingress) if is_ingress else {}
        found[pool.key] = PoolSample(now, ordered, latencies=latencies)
    return found


def _latencies(
    pool: SimulatedPool, prefill: PrefillPhase, decode: DecodePhase, num_ingress: int
) -> Mapping[str, LatencyHistogram]:
    """First tokens are shared among all decode workers alike."""
    share = len(pool.ready()) / num_ingress if num_ingress else 0.0
    observations = {
        "itl": [
            (decode.tokens.get(id(worker), 0.0), decode.step_seconds(worker, pool.speed))
            for worker in pool.workers
        ],
        "ttft": [(share * number, queue + took) for number, queue, took in prefill.served],
        "queue": [(share * number, queue) for number, queue, _ in prefill.served],
    }
    return {name: LatencyHistogram.of(LATENCY_BUCKETS, each) for name, each in observations.items()}


def _name(pool: SimulatedPool, worker: SimulatedWorker) -> str:
    return f"{pool.role}-{pool.name}-{worker.ordinal}"


def _prefill(pod: str, speed: float, phase: PrefillPhase) -> WorkerSample:
    return WorkerSample(
        pod,
        num_requests_running=0.0,
        num_requests_waiting=0.0,
        prefill_queue_requests=0.0,
        prefill_queue_tokens=0.0,
        kv_cache_usage_ratio=0.0,
        engine_busy_ratio=phase.engine_busy_ratio,
        prefill_token_rate=phase.engine_busy_ratio * speed * phase.speeds.prefill_tokens_per_second,
        prefill_busy_rate=phase.engine_busy_ratio,
    )


def _decode(
    pod: str,
    worker: SimulatedWorker,
    phases: tuple[PrefillPhase, DecodePhase],
    arrived: tuple[TraceLoad, float, int],
) -> WorkerSample:
    (prefill, decode), (load, _, num_ingress) = phases, arrived
    requests = load.requests_per_second / num_ingress
    return WorkerSample(
        pod,
        num_requests_running=worker.streams.number,
        num_requests_waiting=decode.num_requests_waiting / num_ingress,
        prefill_queue_requests=prefill.num_requests / num_ingress,
        prefill_queue_tokens=prefill.num_tokens / num_ingress,
        kv_cache_usage_ratio=decode.usage(worker),
        engine_busy_ratio=min(1.0, worker.streams.number),
        request_rate=requests,
        prompt_token_rate=requests * load.input_tokens,
        prefill_token_rate=0.0,
        prefill_busy_rate=0.0,
    )
