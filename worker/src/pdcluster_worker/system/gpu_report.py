"""`nvidia-smi` report on the vLLM container's GPUs, which its liveness probe writes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdcluster_schema.text import one_line
from pdcluster_worker.system.nvidia import GpuUse, together

# name, MiB of memory, MiB used, percent busy, percent of memory traffic; or the reason why not
REPORT = Path("/dev/shm/pdcluster-gpus.csv")

FRESH_SECONDS = 60.0  # six rounds of the probe

_COLUMNS = 5
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class NamedGpu:
    name: str
    use: GpuUse


@dataclass(frozen=True, slots=True)
class GpuReport:
    gpus: tuple[NamedGpu, ...] = ()
    reason: str = ""  # why there are no GPUs

    def use(self) -> GpuUse | None:
        """All together; None without GPUs."""
        return together([gpu.use for gpu in self.gpus])


def read_report(path: Path = REPORT, now: Callable[[], float] = time.time) -> GpuReport:
    try:
        age = now() - path.stat().st_mtime
        text = path.read_text(errors="replace")
    except OSError:
        return GpuReport(reason="its liveness probe has not reported its GPUs")
    if age > FRESH_SECONDS:
        return GpuReport(reason=f"its liveness probe reported its GPUs {age:.0f} s ago")
    return parse_report(text)


def parse_report(text: str) -> GpuReport:
    """GPUs of a report, else its reason.

    >>> parse_report("NVIDIA B200, 183359, 165000, 42, 17").gpus[0].use.busy
    0.42
    >>> parse_report("No devices were found").reason
    'nvidia-smi: No devices were found'
    """
    gpus = [_gpu(line) for line in text.splitlines() if line.strip()]
    if not gpus or None in gpus:
        return GpuReport(reason=f"nvidia-smi: {one_line(text) or 'no GPU'}")
    return GpuReport(tuple(gpu for gpu in gpus if gpu is not None))


def _gpu(line: str) -> NamedGpu | None:
    columns = [column.strip() for column in line.rsplit(",", _COLUMNS - 1)]
    if len(columns) != _COLUMNS or not columns[1].isdigit() or not columns[2].isdigit():
        return None
    name, total, used, busy, memory_busy = columns
    return NamedGpu(
        name,
        GpuUse(int(used) * _MIB, int(total) * _MIB, _ratio(busy), _ratio(memory_busy) or 0.0),
    )


def _ratio(percent: str) -> float | None:
    return min(int(percent), 100) / 100 if percent.isdigit() else None
