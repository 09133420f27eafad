"""A node without a GPU is no error, and its metrics say nothing of one."""

import pytest
from prometheus_client import generate_latest

from pdcluster_worker.machine.nvidia import Gpu, GpuUse, count_gpus
from pdcluster_worker.messages.facts import Device
from pdcluster_worker.metrics import Metrics

NONE = "libno-such-driver.so.1"


@pytest.mark.parametrize("library", [NONE, "libc.so.6"])
def test_without_a_driver_there_is_no_gpu(library: str) -> None:
    assert count_gpus(library) == 0
    assert Gpu(library, library).use() is None


def exported(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("pdcluster_device_"))
    return {name.removeprefix("pdcluster_"): float(value) for name, value in pairs}


def test_gpu_is_exported_as_it_is_at_each_scrape() -> None:
    metrics, uses = Metrics(), iter([GpuUse(20, 80, 0.5)] * 4 + [GpuUse(30, 80, 1.0)] * 3)
    metrics.watch_gpu(Device("cuda", "B200"), lambda: next(uses))

    assert exported(metrics) == {
        'device_memory_bytes{device="B200",state="used"}': 20,
        'device_memory_bytes{device="B200",state="total"}': 80,
        'device_utilization_ratio{device="B200"}': 0.5,
    }
    assert exported(metrics)['device_memory_bytes{device="B200",state="used"}'] == 30


def test_driver_that_stops_answering_is_no_number() -> None:
    metrics, uses = Metrics(), iter([GpuUse(20, 80, 0.5)])
    metrics.watch_gpu(Device("cuda", "B200"), lambda: next(uses, None))

    assert all(value != value for value in exported(metrics).values())


def test_cpu_exports_no_device_memory() -> None:
    metrics = Metrics()
    metrics.watch_gpu(Device("cpu", "Xeon"), lambda: GpuUse(20, 80, 0.5))

    assert exported(metrics) == {}


def test_gpu_that_says_nothing_exports_nothing() -> None:
    metrics = Metrics()
    metrics.watch_gpu(Device("cuda", "B200"), lambda: None)

    assert exported(metrics) == {}
