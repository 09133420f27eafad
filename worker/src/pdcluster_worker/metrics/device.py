"""The device of the engine, and its memory and work."""

import math
from collections.abc import Callable

from prometheus_client import Gauge

from pdcluster_worker.machine.nvidia import GpuUse
from pdcluster_worker.messages.facts import Device
from pdcluster_worker.metrics.registering import Registering


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
        self.device_memory_bytes = self._gauge(
            "device_memory_bytes",
            "memory of a GPU, by state: used by all of its processes, or total",
            "device",
            "state",
        )
        self.device_utilization_ratio = self._gauge(
            "device_utilization_ratio", "share of the last moment with work on a GPU", "device"
        )

    def watch_gpu(self, device: Device, use: Callable[[], GpuUse | None]) -> None:
        """Export memory and work of a GPU, asked at each scrape.

        Nothing of a CPU, or where the driver does not say.
        """
        if device.kind != "cuda" or use() is None:
            return

        def follow(gauge: Gauge, value: Callable[[GpuUse], float]) -> None:
            gauge.set_function(lambda: math.nan if (now := use()) is None else value(now))

        follow(self.device_memory_bytes.labels(device.name, "used"), lambda now: now.used)
        follow(self.device_memory_bytes.labels(device.name, "total"), lambda now: now.total)
        follow(self.device_utilization_ratio.labels(device.name), lambda now: now.busy)
