"""Report of the NVIDIA driver on this process's first GPU, through its own libraries: no torch, no
memory of the device.

Where a library or a call fails there is nothing to say: a node without a GPU is no error here.
"""

import ctypes
from dataclasses import dataclass

DRIVER = "libcuda.so.1"
MANAGEMENT = "libnvidia-ml.so.1"

_BUS_ID_BYTES = 32


@dataclass(frozen=True, slots=True)
class GpuUse:
    """used, total: bytes of memory, of all processes on it.  busy, memory_busy: shares of the last
    moment, 0 to 1, with a kernel on it and with its memory read or written."""

    used: int
    total: int
    busy: float
    memory_busy: float = 0.0


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def count_gpus(driver: str = DRIVER) -> int:
    """GPUs that the driver shows this process; 0 without a driver."""
    number = ctypes.c_int(0)
    try:
        cuda = ctypes.CDLL(driver)
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number)):
            return 0
    except (OSError, AttributeError):  # no such library, or one that is no driver
        return 0
    return number.value


class Gpu:
    """The first GPU that the driver shows this process, which is the one that an engine computes
    on.
    """

    def __init__(self, driver: str = DRIVER, management: str = MANAGEMENT) -> None:
        self._management, self._handle = _open(driver, management)

    def use(self) -> GpuUse | None:
        """Its memory and work at present; None where the driver does not say."""
        if self._management is None:
            return None
        memory, rates = _Memory(), _Rates()
        if self._management.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)):
            return None
        if self._management.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates)):
            return None
        return GpuUse(memory.used, memory.total, rates.gpu / 100, rates.memory / 100)


def _open(driver: str, management: str) -> tuple[ctypes.CDLL | None, ctypes.c_void_p]:
    """The management library and its handle of CUDA's first device: each counts devices in its own
    order, the bus id is one.
    """
    bus_id, handle = ctypes.create_string_buffer(_BUS_ID_BYTES), ctypes.c_void_p()
    try:
        cuda, nvml = ctypes.CDLL(driver), ctypes.CDLL(management)
        if cuda.cuInit(0) or cuda.cuDeviceGetPCIBusId(bus_id, _BUS_ID_BYTES, 0):
            return None, handle
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(
            bus_id, ctypes.byref(handle)
        ):
            return None, handle
    except (OSError, AttributeError):
        return None, handle
    return nvml, handle
