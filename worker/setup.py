"""Builds the kernels with the worker: one shared object for each level of instructions, in wheels
and in editable installs.

The compiler is that of `ziglang`, which comes as a build requirement, so a machine
needs none of its own; else CC, cc or gcc.  Without any the installation goes on and
the worker computes with plain torch operations.  Levels are those of
pdcluster_worker/model/ops/kernel_object.py.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("src/pdcluster_worker/model/ops/kernels")
PACKAGE = "pdcluster_worker.model.ops.kernels"
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-psabi",
    "-fPIC",
    "-shared",
]
X86_64_LEVELS = {
    "amx": "-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16",
    "avx512_bf16": "-march=x86-64-v4 -mavx512bf16",
    "avx512": "-march=x86-64-v4",
    "avx2": "-march=x86-64-v3",
    "plain": "-march=x86-64-v2",
}
GLIBC = "2.28"  # the oldest that torch's wheels run on
# `make release` sets it, to build the wheel of another kind of machine: ziglang compiles for any
MACHINE = os.environ.get("PDCLUSTER_KERNELS_FOR") or platform.machine()


def levels() -> dict[str, list[str]]:
    """Levels of the machine's kind and their flags for the compiler."""
    if MACHINE in ("x86_64", "AMD64"):
        return {level: flags.split() for level, flags in X86_64_LEVELS.items()}
    return {"plain": []}


def digest() -> str:
    """Of all sources, as ops/kernel_object.py computes it: an object knows what it was compiled
    from.
    """
    content = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]")))
    return hashlib.sha256(content).hexdigest()[:16]


def compiler() -> list[str] | None:
    """The command of the compiler, or None."""
    if os.environ.get("CC"):
        return os.environ["CC"].split()
    if importlib.util.find_spec("ziglang"):
        return [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-target",
            f"{MACHINE}-linux-gnu.{GLIBC}",
        ]
    found = shutil.which("cc") or shutil.which("gcc")
    return [found] if found else None


class BuildKernels(build_ext):
    """Compiles each extension, a level, by one call of the compiler."""

    def build_extensions(self) -> None:
        """Compile all levels side by side; one that fails is left out."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for extension, error in zip(
                self.extensions, pool.map(self._attempt, self.extensions), strict=True
            ):
                if error:
                    print(
                        f"warning: no kernels of level {extension.name.rpartition('.')[2]}: "
                        f"{error}",
                        file=sys.stderr,
                    )

    def get_ext_filename(self, fullname: str) -> str:
        """A plain shared object, whose name has no version of Python."""
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """No module of Python: it has no init function."""
        return []

    def _attempt(self, extension: Extension) -> str | None:
        try:
            self._compile(extension)
        except (CompileError, OSError) as e:
            # An older object beside newer Python would take other arguments.
            (SOURCES / f"{extension.name.rpartition('.')[2]}.so").unlink(missing_ok=True)
            return str(e)
        return None

    def _compile(self, extension: Extension) -> None:
        command = compiler()
        if command is None:
            raise CompileError("there is no C compiler: neither ziglang nor CC, cc or gcc")
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = [
            flag.replace("-v", "_v").replace("x86-64", "x86_64") if "ziglang" in command else flag
            for flag in extension.extra_compile_args
        ]
        # Renamed into place: a worker that runs keeps the object that it has mapped.
        part = target.with_suffix(".part")
        ended = subprocess.run(
            [
                *command,
                *FLAGS,
                *flags,
                f"-DKERNEL_SOURCES=0x{digest()}ULL",
                "-o",
                str(part),
                *map(str, sorted(SOURCES.glob("*.c"))),
                "-lm",
            ],
            capture_output=True,
            text=True,
        )
        if ended.returncode:
            raise CompileError(
                f"{command[0]} ended with {ended.returncode}: {ended.stderr[-2000:]}"
            )
        part.replace(target)


class KernelWheel(bdist_wheel):
    """A wheel for every Python 3: the kernels know no version of it."""

    def get_tag(self) -> tuple[str, str, str]:
        """ziglang compiles for an older glibc than this machine's."""
        if "ziglang" in (compiler() or ()):
            return "py3", "none", f"manylinux_{GLIBC.replace('.', '_')}_{MACHINE}"
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"{PACKAGE}.{level}",
            sources=[str(path) for path in sorted(SOURCES.glob("*.c"))],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
            extra_compile_args=flags,
            optional=True,
        )
        for level, flags in levels().items()
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelWheel},
)
