"""Facts of GPUs: from the driver's libraries, and from the report of a container's probe."""

import os
from typing import Any

import pytest
from prometheus_client import generate_latest

from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.system import nvidia
from pdcluster_worker.system.native_dtype import dtype_of_device, slow_note
from pdcluster_worker.system.nvidia import (
    FRESH_SECONDS,
    Gpus,
    GpuUse,
    compute_capability,
    count_gpus,
    parse_report,
    read_report,
)

NONE = "libno-such-driver.so.1"


@pytest.mark.parametrize("library", [NONE, "libc.so.6"])
def test_without_a_driver_there_is_no_gpu(library):
    assert count_gpus(library) == 0
    assert Gpus(1, library, library).use() is None


class Driver:
    """Both libraries, with three GPUs of 80 bytes; the third does not say its work, as a part of a
    GPU does not.  A call writes what its reference is of.
    """

    def __init__(self, _: str) -> None:
        pass

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return flags

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 3
        return 0

    def cuDeviceGetPCIBusId(self, bus_id: Any, _: int, device: int) -> int:  # noqa: N802
        bus_id.value = b"%d" % device
        return int(device >= 3)

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        value._obj.value = {75: (10, 8, 9), 76: (0, 6, 0)}[attribute][device.value]
        return 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: Any, handle: Any) -> int:  # noqa: N802
        handle._obj.value = int(bus_id.value) + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802
        memory._obj.total, memory._obj.used = 80, 10 * handle.value
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:  # noqa: N802
        rates._obj.gpu, rates._obj.memory = 40 * handle.value, 20
        return int(handle.value == 3)


@pytest.mark.parametrize(
    ("num", "use"),
    [
        (1, GpuUse(10, 80, 0.4, 0.2)),
        (2, GpuUse(30, 160, pytest.approx(0.6), 0.2)),
        (3, GpuUse(60, 240, pytest.approx(0.6), pytest.approx(0.4 / 3))),
        (9, GpuUse(60, 240, pytest.approx(0.6), pytest.approx(0.4 / 3))),
    ],
)
def test_gpus_of_a_worker_are_taken_together(monkeypatch, num, use):
    monkeypatch.setattr(nvidia.ctypes, "CDLL", Driver)

    assert count_gpus() == 3
    assert Gpus(num).use() == use


def exported(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    names = ("pdcluster_device_", "pdcluster_gpu_")
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(names))
    return {name.removeprefix("pdcluster_"): float(value) for name, value in pairs}


def test_gpu_is_exported_as_it_is_at_each_scrape():
    metrics, uses = Metrics(), iter([GpuUse(20, 80, 0.5), GpuUse(30, 80, 1.0)])
    metrics.watch_gpu(DeviceFacts("cuda", "B200"), lambda: next(uses))

    assert exported(metrics) == {
        'device_memory_bytes{device="B200",state="used"}': 20,
        'device_memory_bytes{device="B200",state="total"}': 80,
        "gpu_utilization_ratio": 0.5,
    }
    assert exported(metrics)['device_memory_bytes{device="B200",state="used"}'] == 30


def test_driver_that_stops_answering_is_no_number():
    metrics, uses = Metrics(), iter([GpuUse(20, 80, 0.5)])
    metrics.watch_gpu(DeviceFacts("cuda", "B200"), lambda: next(uses, None))

    assert exported(metrics)
    assert exported(metrics) == {}


def test_a_gpu_that_does_not_say_its_work_has_its_memory_alone():
    metrics = Metrics()
    metrics.watch_gpu(DeviceFacts("cuda", "B200"), lambda: GpuUse(20, 80, None))

    assert "gpu_utilization_ratio" not in exported(metrics)
    assert len(exported(metrics)) == 2


def test_cpu_exports_no_device_memory():
    metrics = Metrics()
    metrics.watch_gpu(DeviceFacts("cpu", "Xeon"), lambda: GpuUse(20, 80, 0.5))

    assert exported(metrics) == {}


def test_dtype_follows_the_oldest_gpu(monkeypatch):
    assert compute_capability(NONE) is None
    monkeypatch.setattr(nvidia.ctypes, "CDLL", Driver)

    assert compute_capability() == (8, 6)
    assert dtype_of_device("cuda") == "bfloat16"


def test_gpu_that_does_not_multiply_bfloat16_proposes_float32(monkeypatch):
    class Turing(Driver):
        def cuDeviceGetAttribute(  # noqa: N802
            self, value: Any, attribute: int, device: Any
        ) -> int:
            value._obj.value = {75: 7, 76: 5}[attribute]
            return 0

    monkeypatch.setattr(nvidia.ctypes, "CDLL", Turing)
    assert dtype_of_device("cuda") == "float32"
    assert "which this GPU does not multiply natively" in slow_note("bfloat16", "float32", "cuda")


def test_driver_that_fails_says_no_capability(monkeypatch):
    class Failing(Driver):
        def cuDeviceGetAttribute(self, *_: Any) -> int:  # noqa: N802
            return 999

    monkeypatch.setattr(nvidia.ctypes, "CDLL", Failing)
    assert compute_capability() is None


TWO_GPUS = "NVIDIA B200, 1000, 900, 80, 40\nNVIDIA B200, 1000, 700, 40, 20\n"
MIB = 2**20


def test_gpus_of_a_report_are_taken_together():
    report = parse_report(TWO_GPUS)

    assert [gpu.name for gpu in report.gpus] == ["NVIDIA B200"] * 2
    assert report.use() == GpuUse(1600 * MIB, 2000 * MIB, pytest.approx(0.6), pytest.approx(0.3))


def test_a_part_of_a_gpu_says_its_memory_and_not_its_work():
    use = parse_report("NVIDIA H100 MIG 1g.10gb, 9984, 9000, [N/A], [N/A]\n").use()

    assert use == GpuUse(9000 * MIB, 9984 * MIB, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "nvidia-smi: no GPU"),
        ("No devices were found\n", "nvidia-smi: No devices were found"),
        ("a\nb", "nvidia-smi: a b"),
        ("NVIDIA B200, [N/A], 9, 1, 1", "nvidia-smi: NVIDIA B200, [N/A], 9, 1, 1"),
        (f"{TWO_GPUS}Unable to determine the device handle", "Unable to determine"),
    ],
)
def test_what_is_no_report_is_the_reason(text, reason):
    report = parse_report(text)

    assert (report.gpus, report.use()) == ((), None)
    assert reason in report.reason


def test_no_report_and_an_old_one_say_nothing(tmp_path):
    path = tmp_path / "gpus.csv"
    assert read_report(path).reason == "its liveness probe has not reported its GPUs"

    path.write_text(TWO_GPUS)
    os.utime(path, (1000.0, 1000.0))
    assert read_report(path, lambda: 1000.0 + FRESH_SECONDS).use() is not None
    late = read_report(path, lambda: 1001.0 + FRESH_SECONDS)
    assert (late.gpus, late.reason) == ((), "its liveness probe reported its GPUs 61 s ago")
