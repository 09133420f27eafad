"""Metrics of simulated workers, as one scrape of every pool."""

from collections.abc import Mapping, Sequence

from pdcluster_api.plan.autoscale.values import PoolSample, WorkerSample
from pdcluster_schema.workload import PoolKey
from pdctl.replay.pools import SimulatedPool, SimulatedWorker
from pdctl.replay.queueing import DecodePhase, PrefillPhase
from pdctl.replay.trace import TraceLoad


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
                    (pool, worker),
                    (prefill, decode),
                    (load, seconds, num_ingress),
                )
                for worker in pool.ready()
            ]
        found[pool.key] = PoolSample(now, tuple(sorted(workers, key=lambda worker: worker.pod)))
    return found


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
    of: tuple[SimulatedPool, SimulatedWorker],
    phases: tuple[PrefillPhase, DecodePhase],
    arrived: tuple[TraceLoad, float, int],
) -> WorkerSample:
    (pool, worker), (prefill, decode), (load, seconds, num_ingress) = of, phases, arrived
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
        generation_token_rate=decode.tokens.get(id(worker), 0.0) / seconds,
        time_to_first_token_seconds=prefill.ttft_seconds,
        time_per_output_token_seconds=decode.step_seconds(worker, pool.speed)
        if not worker.streams.is_done
        else None,
    )
