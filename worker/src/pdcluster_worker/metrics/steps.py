"""Steps of the engine: their size, their time, and what failed in them."""

from pdcluster_worker.messages.engine import RAISED, ROW_FAILURES
from pdcluster_worker.metrics.registering import REQUESTS, Registering

_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepMetrics(Registering):
    """Sizes, times and failures of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.engine_step_seconds = self._histogram("engine_step_seconds", "one engine step", "kind")
        self.engine_step_requests = self._histogram(
            "engine_step_requests", "requests in one engine step", buckets=REQUESTS
        )
        self.engine_step_tokens = self._histogram(
            "engine_step_tokens",
            "tokens in one engine step, of each kind that it has",
            "kind",
            buckets=_TOKENS,
        )
        self.engine_steps = self._counter("engine_steps", "engine steps")
        self.prefill_seconds = self._counter(
            "prefill_seconds", "engine time spent on prefill tokens"
        )
        self.decode_seconds = self._counter("decode_seconds", "engine time spent on decode tokens")
        self.engine_overhead_seconds = self._counter(
            "engine_overhead_seconds", "engine time spent outside the model"
        )
        self.engine_phase_seconds = self._counter(
            "engine_phase_seconds",
            "engine time inside the model, by phase",
            "phase",
            first=("inputs", "forward", "sample"),
        )
        self.engine_failed_rows = self._counter(
            "engine_failed_rows",
            "requests that failed in a step of the model, by reason",
            "reason",
            first=(*ROW_FAILURES, RAISED),
        )
