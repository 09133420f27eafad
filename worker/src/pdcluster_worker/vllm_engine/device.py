"""Device of a vLLM engine, from its build version and the memory use of its container's GPUs."""

import asyncio
from collections import Counter
from collections.abc import Callable

from pdcluster_worker.config.worker import NO_ACCELERATOR
from pdcluster_worker.messages.facts import UNKNOWN_DEVICE, DeviceFacts
from pdcluster_worker.system.nvidia import GpuReport, NamedGpu, read_report

REPORT_SECONDS = 30.0  # three rounds of the probe that writes the report

POLL_SECONDS = 1.0
_BUILDS = ("rocm", "tpu", "xpu")
_LEAST_USED = 0.01  # of a GPU's memory: an idle one uses less, a serving engine more


async def read_device(
    version: str, gpu: str, read: Callable[[], GpuReport] = read_report
) -> DeviceFacts:
    """version: of vLLM, such as 0.32.0+cpu.  gpu: the pool's type."""
    build = version.partition("+")[2].split(".")
    if "cpu" in build or gpu == NO_ACCELERATOR:
        return DeviceFacts("cpu", "cpu")
    for kind in _BUILDS:
        if any(part.startswith(kind) for part in build):
            return DeviceFacts(kind, kind)
    return device_of(await _report(read))


def device_of(report: GpuReport) -> DeviceFacts:
    """Device of a serving engine, by the memory that its GPUs use."""
    gpus = report.gpus
    if not gpus:
        return DeviceFacts(UNKNOWN_DEVICE, "", note=f"vLLM does not say it, and {report.reason}")
    used = [gpu for gpu in gpus if gpu.use.used >= _LEAST_USED * gpu.use.total]
    if not used:
        note = f"it serves, and {_counted(gpus)} of its container hold nothing"
        return DeviceFacts("cpu", "cpu", note=note)
    idle = f"; {len(gpus) - len(used)} more hold nothing" if len(used) < len(gpus) else ""
    memory = min(gpu.use.total for gpu in used) / 2**30
    return DeviceFacts("cuda", _counted(used), note=f"{memory:.0f} GiB each{idle}")


def _counted(gpus: list[NamedGpu] | tuple[NamedGpu, ...]) -> str:
    counts = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{num} x {name}" if num > 1 else name for name, num in counts.items())


async def _report(read: Callable[[], GpuReport]) -> GpuReport:
    """The first report with GPUs, or the last one."""
    polls = round(REPORT_SECONDS / POLL_SECONDS)
    for _ in range(polls):
        report = read()
        if report.gpus:
            return report
        await asyncio.sleep(POLL_SECONDS)
    return read()
