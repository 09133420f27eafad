"""The engine processes of a worker: whether they serve and make progress.

Several engine processes have a rank each; their ranks are bounded by the setting.
"""

from pdcluster_worker.metrics.registering import Registering


class ProcessMetrics(Registering):
    """States, requests and restarts of engine processes."""

    def __init__(self) -> None:
        super().__init__()
        self.engine_busy_ratio = self._gauge(
            "engine_busy_ratio", "share of the last seconds spent in a step"
        )
        self.engine_stalled = self._gauge(
            "engine_stalled", "1 while the engine makes no progress, else 0"
        )
        self.engine_up = self._gauge(
            "engine_up", "1 while that engine process of this worker serves, else 0", "engine"
        )
        self.engine_requests = self._counter(
            "engine_requests", "requests given to each engine process of this worker", "engine"
        )
        self.engine_restarts = self._counter(
            "engine_restarts",
            "engine processes started again beside others that served on",
            "engine",
        )
