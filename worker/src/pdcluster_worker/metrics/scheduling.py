"""The engine's scheduler: preemptions, and prompts that the prefill delayer held back."""

from pdcluster_worker.metrics.registering import Registering

# 28 and 29: one below the default bound, and it.
_PASSES = (0, 5, 10, 20, 28, 29, 50, 100, 500, 1000, 9999)
# The source's, and shorter ones.
_DELAYS = (
    *(0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    *(5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
)


class SchedulingMetrics(Registering):
    """The scheduler in use, its preemptions and its delays."""

    def __init__(self) -> None:
        super().__init__()
        self.engine_scheduler_info = self._gauge(
            "engine_scheduler_info",
            "always 1; its labels name the scheduler of the engine",
            "scheduler",
            "policy",
        )
        self.preemptions = self._counter("preemptions", "requests preempted to recompute")
        self.prefill_delayer_outcomes = self._counter(
            "prefill_delayer_outcomes",
            "passes of the prefill delayer",
            "prefillable",
            "allowed",
            "reason",
            "executed",
        )
        self.prefill_delayer_wait_passes = self._histogram(
            "prefill_delayer_wait_passes",
            "passes for which prompts were held back",
            buckets=_PASSES,
        )
        self.prefill_delayer_wait_seconds = self._histogram(
            "prefill_delayer_wait_seconds",
            "time for which prompts were held back",
            buckets=_DELAYS,
        )
