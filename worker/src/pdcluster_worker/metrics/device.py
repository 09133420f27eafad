"""The device of the engine, and its memory and work."""

from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.metrics.registering import Registering
from pdcluster_worker.system.nvidia import GpuUse


class DeviceMetrics(Registering):
    """The device and its dtype, which are fixed, and its use, asked at each scrape."""

    def __init__(self) -> None:
        super().__init__()
        self.engine_device_info = self._gauge(
            "engine_device_info",
            "always 1; its labels name the device of the engine",
            "device",
            "name",
        )
        self.engine_dtype_info = self._gauge(
            "engine_dtype_info",
            "always 1; its labels name the dtype of the engine",
            "dtype",
            "native",
        )
        self._gpus = _Gpus()
        self.registry.register(self._gpus)

    def watch_gpu(self, device: DeviceFacts, use: Callable[[], GpuUse | None]) -> None:
        """Export memory and work of the worker's GPUs, asked at each scrape; nothing of a CPU."""
        if device.kind == "cuda":
            self._gpus.name, self._gpus.use = device.name, use


class _Gpus(Collector):
    """Two metrics that have no sample while the driver says nothing: a scraper would not believe a
    page with a NaN, and 0 would be a GPU without work.
    """

    def __init__(self) -> None:
        self.name = ""
        self.use: Callable[[], GpuUse | None] = lambda: None

    def collect(self) -> Iterator[Metric]:
        """The two, by one question to the driver."""
        memory = GaugeMetricFamily(
            "pdcluster_device_memory_bytes",
            "memory of the worker's GPUs, by state: used by all of their processes, or total",
            labels=("device", "state"),
        )
        utilization = GaugeMetricFamily(
            "pdcluster_gpu_utilization_ratio",
            "share of the last moment with a kernel on the worker's GPUs, mean of them",
        )
        now = self.use()
        if now is not None:
            memory.add_metric((self.name, "used"), now.used)
            memory.add_metric((self.name, "total"), now.total)
            if now.busy is not None:
                utilization.add_metric((), now.busy)
        yield memory
        yield utilization
