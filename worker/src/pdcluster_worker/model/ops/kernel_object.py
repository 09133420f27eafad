"""Loads the best compiled kernels for this CPU, or gives the reason why there are none."""

import ctypes
import functools
import hashlib
import os
import platform
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pdcluster_worker.errors import ConfigError
from pdcluster_worker.system.cpu_cores import spins_of

KERNELS_VARIABLE = "PDCLUSTER_KERNELS"  # environment variable: "off", or the level to use

_IS_X86 = platform.machine() in ("x86_64", "AMD64")

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})

LEVELS: dict[str, frozenset[str]] = {
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"}),
    "plain": frozenset(
        {"cx16", "lahf_lm", "popcnt", "ssse3", "sse4_1", "sse4_2"} if _IS_X86 else ()
    ),
}
"""CPU flags of each level, best first; worker/setup.py builds an object for each."""

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}

# result and arguments; without them ctypes would pass 32 bits of an address
_SIGNATURES = {
    "add_rms_norm": " ipppiipfi",
    "gate_mul": " ippiii",
    "rope_store": " pppipp",
    "attend": "ippppiip",
    "adapt": " pppppp",
    "experts": "iipppiii",
    "layers": "ippppppp",
    "product": " pppi",
    "packed_bytes": "iiii",
    "pack": " ippii",
    "pack_codes": " ippii",
    "unpack": " pppii",
    "share_rows": " ppii",
}

_FUNCTIONS = (*_SIGNATURES, "start", "bound", "sample_rows", "rank_rows", "sources")

_BUILD_AGAIN = "install it again with ziglang, or with a compiler that CC names"

_FOLDER = Path(__file__).parent / "kernels"


@dataclass(frozen=True, slots=True)
class Kernels:
    level: str
    library: ctypes.CDLL
    skipped: str = ""  # why a better level is not used, and the fix


@dataclass(frozen=True, slots=True)
class NoKernels:
    """reason: with the fix, for the log and /version."""

    reason: str


def find_kernels() -> Kernels | NoKernels:
    """Raises ConfigError for a bad PDCLUSTER_KERNELS."""
    return load_kernels(requested_level(), cpu_flags())


def requested_level() -> str:
    """A level, "off", or "" for the best one.  Raises ConfigError."""
    requested = os.environ.get(KERNELS_VARIABLE, "")
    if requested not in ("", "off", *LEVELS):
        raise ConfigError(
            f"environment variable {KERNELS_VARIABLE} is {requested!r}: set it to off or one of "
            f"{', '.join(LEVELS)}, or unset it for the best one"
        )
    return requested


@functools.cache
def load_kernels(requested: str, flags: Set[str], folder: Path = _FOLDER) -> Kernels | NoKernels:
    """requested: a level, "off", or "" for the best one."""
    if requested == "off":
        return NoKernels(f"{KERNELS_VARIABLE} is off: unset it for the compiled kernels")
    if requested and (missing := LEVELS[requested] - flags):
        return NoKernels(
            f"{KERNELS_VARIABLE} is {requested}, but this CPU has no {', '.join(sorted(missing))}: "
            "unset it for the best level that the CPU runs"
        )
    levels = (
        [requested] if requested else [level for level, needed in LEVELS.items() if needed <= flags]
    )
    if not levels:
        lacking = ", ".join(sorted(LEVELS["plain"] - flags))
        return NoKernels(
            f"this CPU has no {lacking}, or /proc/cpuinfo does not say so: use one of x86-64-v2 or "
            "newer"
        )
    skipped, reason = "", ""
    for level in levels:
        path = folder / f"{level}.so"
        if not path.exists():
            skipped = skipped or (
                f"kernels of level {level} were not built when the worker was installed: "
                f"{_BUILD_AGAIN}"
            )
            continue
        loaded = _load(path, level, requested)
        if isinstance(loaded, Kernels):
            return replace(loaded, skipped=skipped)
        reason = loaded.reason
        skipped = skipped or reason
    if not any(folder.glob("*.so")):
        reason = (
            f"no kernels were built for {platform.machine()}: no C compiler was found when the "
            f"worker was installed: {_BUILD_AGAIN}"
        )
    return NoKernels(reason or skipped)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Empty on a machine that is not x86-64."""
    return frozenset(cpu_info("flags").split())


def cpu_info(name: str) -> str:
    """The first such line of /proc/cpuinfo; empty without one."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _load(path: Path, level: str, requested: str) -> Kernels | NoKernels:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as e:
        return NoKernels(f"kernels {path.name} cannot be loaded ({e}): install the worker again")
    if not all(hasattr(library, name) for name in _FUNCTIONS) or not _is_of_these_sources(
        library, path.parent
    ):
        return NoKernels(
            f"kernels {path.name} are of another version of the worker: install it again"
        )
    functions = _thread_functions()
    if functions is None:
        return NoKernels(
            "torch has loaded no libgomp whose threads the kernels could share: install the torch "
            "of PyPI for Linux"
        )
    error = library.start(*functions, ctypes.c_int64(spins_of(os.environ)))
    if error:
        lower = f", or unset {KERNELS_VARIABLE} for a lower level" if requested else ""
        return NoKernels(
            f"kernels {path.name} do not run here, as the kernel refuses the tiles of AMX (error "
            f"{error}): use Linux 5.16 or newer{lower}"
        )
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = _TYPES.get(types[0])
        function.argtypes = [_TYPES[kind] for kind in types[1:]]
    return Kernels(level, library)


def _is_of_these_sources(library: ctypes.CDLL, folder: Path) -> bool:
    """Return whether it was compiled from these sources; True in a wheel, which has none."""
    paths = sorted(folder.glob("*.[ch]"))
    if not paths:
        return True
    library.sources.restype = ctypes.c_uint64
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]
    return bool(library.sources() == int(digest, 16))


def _thread_functions() -> list[ctypes.c_void_p] | None:
    """Functions of torch's libgomp; None where it has loaded none."""
    names = (
        "GOMP_parallel",
        *(f"omp_get_{name}" for name in ("thread_num", "num_threads", "max_threads")),
    )
    for place in _gomp_places():
        try:
            gomp = ctypes.CDLL(place)
            return [ctypes.cast(getattr(gomp, name), ctypes.c_void_p) for name in names]
        except (OSError, AttributeError):
            continue
    return None


def _gomp_places() -> list[str]:
    """The libgomp that torch has loaded; another would have its own threads."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        maps = ""
    found = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libgomp" in line}
    folder = Path(torch.__file__).parent / "lib"
    ours = [str(path) for path in sorted(folder.glob("libgomp*")) if str(path) in found]
    return ours or sorted(found)
