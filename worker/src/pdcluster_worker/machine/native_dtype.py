"""The dtype that this CPU computes fastest in, as Linux says."""

from pathlib import Path
from typing import Literal

CPU_INFO = Path("/proc/cpuinfo")

DType = Literal["float32", "bfloat16"]

_NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_tile"})
"""CPU flags; `model.loading.loader` asks torch for the same."""


def native_dtype(cpu_info: str) -> DType:
    """bfloat16 where the CPU multiplies it natively, else float32.  cpu_info: the text of
    /proc/cpuinfo

    >>> native_dtype("flags : fpu avx512f avx512_bf16"), native_dtype("flags : fpu avx2")
    ('bfloat16', 'float32')
    """
    lines = (line for line in cpu_info.splitlines() if line.startswith("flags"))
    return "bfloat16" if _NATIVE_BFLOAT16.intersection(next(lines, "").split()) else "float32"


def slow_note(dtype: str, native: DType) -> str:
    """Say what a dtype costs that the CPU does not multiply natively, and the fix; empty = it does.

    >>> slow_note("float32", "bfloat16"), slow_note("bfloat16", "float32")[:22]
    ('', 'computes in bfloat16, ')
    """
    if dtype in (native, "float32"):
        return ""
    return (
        f"computes in {dtype}, which this CPU does not multiply natively: prompts take several "
        "times as long as in float32; "
        "set model.dtype to float32, or run on CPUs with AVX512-BF16 or AMX"
    )


def read_native_dtype(path: Path = CPU_INFO) -> DType:
    """`machine.native_dtype` of this machine; float32 where it does not say."""
    try:
        return native_dtype(path.read_text(errors="replace"))
    except OSError:
        return "float32"
