"""Pages as a worker writes them: its own registry with traffic in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import generate_latest

from pdcluster_worker.metrics import Metrics


@dataclass
class WorkerPages:
    """One life of one worker."""

    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        for state in ("free", "cached", "in_use", "receiving", "quarantined"):
            self.metrics.kv_blocks.labels(state).set(100)
        for role in ("prefill", "decode"):
            for state in ("starting", "ready", "draining", "drained"):
                self.metrics.peers.labels(role, state).set(2)
        for phase in ("queue", "prefill", "transfer", "first_step"):
            self.metrics.ttft_phase_seconds.labels(phase).observe(0.1)
        for kind in ("prefill", "decode", "mixed"):
            self.metrics.engine_step_seconds.labels(kind).observe(0.02)
        for reason in ("stop", "length", "abort"):
            self.metrics.request_success.labels(reason).inc()

    def set(self, **gauges: float) -> None:
        """Set gauges by their names."""
        for name, value in gauges.items():
            getattr(self.metrics, name).set(value)

    def serve(self, *, requests: int, ttft_seconds: float = 0.5, itl_seconds: float = 0.25) -> None:
        """So many requests of 100 prompt tokens and 10 generated ones, each with 0.25 s of prefill,
        came and went.
        """
        for _ in range(requests):
            self.metrics.time_to_first_token_seconds.observe(ttft_seconds)
            for _ in range(9):
                self.metrics.inter_token_latency_seconds.observe(itl_seconds)
            self.metrics.prompt_tokens.inc(100)
            self.metrics.prefill_tokens.inc(100)
            self.metrics.prefill_seconds.inc(0.25)
            self.metrics.generation_tokens.inc(10)

    def text(self) -> bytes:
        """The page now."""
        return generate_latest(self.metrics.registry)


def changed(page: bytes, values: Mapping[str, str]) -> bytes:
    """The page with other values (text) for some metrics, by their full names; each
    must be there.
    """
    lines = page.decode().splitlines()
    names = [line.partition(" ")[0] for line in lines]
    for name, value in values.items():
        lines[names.index(name)] = f"{name} {value}"
    return ("\n".join(lines) + "\n").encode()
