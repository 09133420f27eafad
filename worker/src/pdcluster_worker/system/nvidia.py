"""Facts of GPUs from the NVIDIA driver's libraries or a probe's `nvidia-smi`; no call raises."""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdcluster_schema.text import one_line

DRIVER = "libcuda.so.1"
MANAGEMENT = "libnvidia-ml.so.1"

# Written by the vLLM container's liveness probe: name, MiB of memory, MiB used, percent busy,
# percent of memory traffic; or the reason why not.
REPORT = Path("/dev/shm/pdcluster-gpus.csv")
FRESH_SECONDS = 60.0  # six rounds of the probe
_COLUMNS = 5
_MIB = 2**20

_BUS_ID_BYTES = 32
_CAPABILITY = (75, 76)  # attributes in CUDA's driver API: compute capability, major and minor


@dataclass(frozen=True, slots=True)
class GpuUse:
    used: int  # bytes, of all processes
    total: int  # bytes
    busy: float | None  # share of time with a kernel; None = unknown (MIG)
    memory_busy: float = 0.0  # share of time with memory traffic


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def count_gpus(driver: str = DRIVER) -> int:
    """0 without a driver."""
    number = ctypes.c_int(0)
    try:
        cuda = ctypes.CDLL(driver)
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number)):
            return 0
    except (OSError, AttributeError):  # no such library, or one that is no driver
        return 0
    return number.value


def compute_capability(driver: str = DRIVER) -> tuple[int, int] | None:
    """Lowest of the visible GPUs; None = unknown."""
    lowest: tuple[int, int] | None = None
    device, value = ctypes.c_int(0), ctypes.c_int(0)
    try:
        cuda = ctypes.CDLL(driver)
        for index in range(count_gpus(driver)):
            if cuda.cuDeviceGet(ctypes.byref(device), index):
                return None
            found = []
            for attribute in _CAPABILITY:
                if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
                    return None
                found.append(value.value)
            lowest = min(lowest or (found[0], found[1]), (found[0], found[1]))
    except (OSError, AttributeError):
        return None
    return lowest


def together(uses: Sequence[GpuUse]) -> GpuUse | None:
    """Sum of memory, mean of utilization; None without GPUs.

    >>> together([GpuUse(1, 8, 1.0, 0.5), GpuUse(3, 8, 0.5, 0.0)])
    GpuUse(used=4, total=16, busy=0.75, memory_busy=0.25)
    """
    if not uses:
        return None
    busy = [each.busy for each in uses if each.busy is not None]
    return GpuUse(
        sum(each.used for each in uses),
        sum(each.total for each in uses),
        sum(busy) / len(busy) if busy else None,
        sum(each.memory_busy for each in uses) / len(uses),
    )


class Gpus:
    """The first visible GPUs, which an engine's ranks use."""

    def __init__(self, num: int, driver: str = DRIVER, management: str = MANAGEMENT) -> None:
        self._management, self._handles = _open(num, driver, management)

    def use(self) -> GpuUse | None:
        """None where the driver does not report it."""
        uses = [self._use(handle) for handle in self._handles]
        return together([use for use in uses if use is not None])

    def _use(self, handle: ctypes.c_void_p) -> GpuUse | None:
        assert self._management is not None, "a handle is the library's"
        memory, rates = _Memory(), _Rates()
        if self._management.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        if self._management.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)):
            return GpuUse(memory.used, memory.total, None)
        return GpuUse(memory.used, memory.total, rates.gpu / 100, rates.memory / 100)


def _open(
    num: int, driver: str, management: str
) -> tuple[ctypes.CDLL | None, list[ctypes.c_void_p]]:
    """NVML and its handles of CUDA's first devices, matched by bus id: their orders differ."""
    handles: list[ctypes.c_void_p] = []
    try:
        cuda, nvml = ctypes.CDLL(driver), ctypes.CDLL(management)
        if cuda.cuInit(0) or nvml.nvmlInit_v2():
            return None, []
        for index in range(num):
            bus_id, handle = ctypes.create_string_buffer(_BUS_ID_BYTES), ctypes.c_void_p()
            if cuda.cuDeviceGetPCIBusId(bus_id, _BUS_ID_BYTES, index):
                break
            if not nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(handle)):
                handles.append(handle)
    except (OSError, AttributeError):
        return None, []
    return nvml, handles


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
