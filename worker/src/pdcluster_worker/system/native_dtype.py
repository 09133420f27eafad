"""The dtype that a device computes fastest in."""

import logging
from pathlib import Path
from typing import Literal

from pdcluster_worker.system.nvidia import compute_capability

logger = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")

DType = Literal["float32", "bfloat16"]

# CPU flags
_NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_tile"})

_BFLOAT16_GPUS = (8, 0)


def native_dtype(cpu_info: str) -> DType:
    """cpu_info: text of /proc/cpuinfo.

    >>> native_dtype("flags : fpu avx512f avx512_bf16"), native_dtype("flags : fpu avx2")
    ('bfloat16', 'float32')
    """
    lines = (line for line in cpu_info.splitlines() if line.startswith("flags"))
    return "bfloat16" if _NATIVE_BFLOAT16.intersection(next(lines, "").split()) else "float32"


def slow_note(dtype: str, native: DType, kind: str = "cpu") -> str:
    """Warning about a dtype that the device does not multiply natively, with the fix; else empty.

    >>> slow_note("float32", "bfloat16"), slow_note("bfloat16", "float32")[:22]
    ('', 'computes in bfloat16, ')
    """
    if dtype in (native, "float32"):
        return ""
    device, better = (
        ("CPU", "CPUs with AVX512-BF16 or AMX")
        if kind == "cpu"
        else ("GPU", "GPUs of compute capability 8.0 or later")
    )
    return (
        f"computes in {dtype}, which this {device} does not multiply natively: prompts take "
        f"several times as long as in float32; set model.dtype to float32, or run on {better}"
    )


def gpu_dtype(capability: tuple[int, int] | None) -> DType:
    """bfloat16 from Ampere (compute capability 8.0) on, or if unknown; float16 is not supported.

    >>> gpu_dtype((10, 0)), gpu_dtype((7, 5)), gpu_dtype(None)
    ('bfloat16', 'float32', 'bfloat16')
    """
    return "bfloat16" if capability is None or capability >= _BFLOAT16_GPUS else "float32"


def dtype_of_device(kind: str) -> DType:
    """The dtype that `auto` proposes.  kind: cuda or cpu."""
    return gpu_dtype(compute_capability()) if kind == "cuda" else read_native_dtype()


def read_native_dtype(path: Path = CPU_INFO) -> DType:
    """Read this machine's; float32 where it is unknown."""
    try:
        return native_dtype(path.read_text(errors="replace"))
    except OSError:
        return "float32"


def log_speed(dtype: DType, native: DType, kind: str = "cpu") -> None:
    """Log what a dtype that is not this device's own costs.  kind: cpu or cuda"""
    if note := slow_note(dtype, native, kind):
        logger.warning(note)
    elif dtype != native:
        device = "CPU" if kind == "cpu" else "GPU"
        logger.info(
            "computes in float32; this %s is faster in bfloat16, which model.dtype may ask for",
            device,
        )
