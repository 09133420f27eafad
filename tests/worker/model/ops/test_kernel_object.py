"""Kernels that a process gets: the best that the CPU runs, the one that is asked for, or none and a
reason.
"""

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from pdcluster_worker.errors import ConfigError, ModelError
from pdcluster_worker.model import decoder_loader
from pdcluster_worker.model.decoder_loader import make_operations
from pdcluster_worker.model.ops import kernel_object
from pdcluster_worker.model.ops.cpu import CpuOperations
from pdcluster_worker.model.ops.kernel_object import (
    LEVELS,
    Kernels,
    NoKernels,
    cpu_flags,
    load_kernels,
)
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.step_plan import StepLimits
from pdcluster_worker.system.process import keep_freed_memory

ROOT = Path(__file__).parents[4]
FOLDER = Path(kernel_object.__file__).parent / "kernels"
CACHE = torch.zeros(1, 1, 1, 2, 16, 16)
SHAPE = AttentionShape(1, 1, 16, 1.0)
LIMITS = StepLimits(max_tokens=8, max_sequences=2, longest=16, block_size=16)


def test_the_best_level_that_the_cpu_runs_is_chosen():
    expected = next(
        level
        for level, needed in LEVELS.items()
        if needed <= cpu_flags() and (FOLDER / f"{level}.so").exists()
    )
    found = load_kernels("", cpu_flags())
    assert isinstance(found, Kernels)
    assert found.level == expected


def test_a_cpu_without_a_levels_flags_gets_a_lower_one():
    found = load_kernels("", cpu_flags() - {"amx_tile", "avx512_bf16", "avx512f", "avx2"})
    assert isinstance(found, Kernels)
    assert found.level == "plain"


@pytest.mark.parametrize(
    ("requested", "flags", "reason"),
    [
        (
            "amx",
            LEVELS["amx"] - {"amx_tile"},
            "PDCLUSTER_KERNELS is amx, but this CPU has no amx_tile: unset it for the best level "
            "that the CPU runs",
        ),
        ("off", cpu_flags(), "PDCLUSTER_KERNELS is off: unset it for the compiled kernels"),
        (
            "",
            LEVELS["plain"] - {"ssse3"},
            "this CPU has no ssse3, or /proc/cpuinfo does not say so: use one of x86-64-v2 or "
            "newer",
        ),
    ],
)
def test_kernels_that_cannot_be_are_refused_with_what_is_missing(requested, flags, reason):
    if not (requested or LEVELS["plain"]):
        pytest.skip("such a CPU needs no flags")
    assert load_kernels(requested, flags) == NoKernels(reason)


@pytest.mark.parametrize("cache", [CACHE, mock.Mock(is_cuda=True)], ids=["cpu", "cuda"])
def test_a_level_that_does_not_exist_is_refused_with_those_that_do(monkeypatch, cache):
    monkeypatch.setenv("PDCLUSTER_KERNELS", "sse9")
    with pytest.raises(ConfigError) as refused:
        make_operations(cache, SHAPE, LIMITS, invariant=False)
    assert str(refused.value) == (
        "environment variable PDCLUSTER_KERNELS is 'sse9': set it to off or one of amx, "
        "avx512_bf16, avx512, avx2, plain, or unset it for the best one"
    )


def test_without_objects_there_is_a_reason(tmp_path):
    found = load_kernels("", cpu_flags(), tmp_path)
    assert isinstance(found, NoKernels)
    assert "no C compiler was found" in found.reason
    assert "install it again with ziglang" in found.reason


def test_an_object_that_cannot_be_loaded_is_skipped(tmp_path):
    (tmp_path / "amx.so").write_bytes(b"not an object")
    (tmp_path / "plain.so").write_bytes(b"nor this one")
    found = load_kernels("", cpu_flags(), tmp_path)
    assert isinstance(found, NoKernels)
    assert "plain.so cannot be loaded" in found.reason
    if not (FOLDER / "avx2.so").exists():
        pytest.skip("the worker was installed without kernels, or not on x86-64: no object of avx2")
    shutil.copy(FOLDER / "avx2.so", tmp_path)
    found = load_kernels.__wrapped__("", LEVELS["amx"] | cpu_flags(), tmp_path)
    assert isinstance(found, Kernels)
    assert found.skipped.startswith("kernels amx.so cannot be loaded (")
    assert found.skipped.endswith("): install the worker again")
    note = f"computes by kernels of a lower level: {found.skipped}"
    assert CpuOperations(CACHE, SHAPE, found).note == note


def not_built(level):
    return (
        f"kernels of level {level} were not built when the worker was installed: install it again "
        "with ziglang, or with a compiler that CC names"
    )


def test_a_better_object_that_was_not_built_is_named(tmp_path, monkeypatch):
    (tmp_path / "avx2.so").touch()
    monkeypatch.setattr(kernel_object, "_load", lambda path, level, requested: Kernels(level, None))
    found = load_kernels.__wrapped__("", LEVELS["avx512"] | LEVELS["avx2"], tmp_path)
    assert found == Kernels("avx2", None, not_built("avx512"))
    best = load_kernels.__wrapped__("", LEVELS["avx2"], tmp_path)
    assert best == Kernels("avx2", None, "")


@pytest.mark.parametrize("requested", ["amx", ""])
def test_a_level_that_was_not_built_with_others_is_no_missing_compiler(tmp_path, requested):
    (tmp_path / "other.so").touch()
    found = load_kernels.__wrapped__(requested, LEVELS["amx"], tmp_path)
    assert found == NoKernels(not_built("amx"))


@pytest.mark.parametrize(
    ("requested", "fix"),
    [("", ""), ("amx", ", or unset PDCLUSTER_KERNELS for a lower level")],
)
def test_refused_tiles_name_the_variable_that_sets_them(tmp_path, monkeypatch, requested, fix):
    (tmp_path / "amx.so").touch()
    monkeypatch.setattr(kernel_object, "_thread_functions", list)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: mock.Mock(start=lambda *given: 22))
    found = load_kernels.__wrapped__(requested, LEVELS["amx"], tmp_path)
    assert found == NoKernels(
        "kernels amx.so do not run here, as the kernel refuses the tiles of AMX (error 22): use "
        f"Linux 5.16 or newer{fix}"
    )


def test_without_libgomp_there_are_no_kernels_and_the_fix_is_named(monkeypatch):
    if not (FOLDER / "plain.so").exists():
        pytest.skip("the worker was installed without kernels")
    monkeypatch.setattr(kernel_object, "_gomp_places", list)
    assert load_kernels.__wrapped__("plain", cpu_flags()) == NoKernels(
        "torch has loaded no libgomp whose threads the kernels could share: install the torch of "
        "PyPI for Linux"
    )


def test_operations_are_the_kernels_or_plain_torch_which_say_why(monkeypatch, caplog):
    kernels = make_operations(CACHE, SHAPE, LIMITS, invariant=False)
    assert (kernels.name.split()[0], kernels.note) == ("cpu", "")
    assert make_operations(CACHE, SHAPE, LIMITS, invariant=True).name.startswith("cpu ")
    monkeypatch.setattr(
        decoder_loader, "find_kernels", lambda: NoKernels("the test took them away")
    )
    found = make_operations(CACHE, SHAPE, LIMITS, invariant=False)
    assert (found.name, found.note) == (
        "reference",
        "computes with plain torch operations, which are slower: the test took them away",
    )
    assert found.note in caplog.text
    with pytest.raises(
        ModelError, match="batchInvariant needs the compiled kernels: the test took them away"
    ):
        make_operations(CACHE, SHAPE, LIMITS, invariant=True)


def test_a_dtype_without_kernels_gets_plain_torch(caplog):
    assert make_operations(CACHE.half(), SHAPE, LIMITS, invariant=False).name == "reference"
    assert "none for torch.float16: set model.dtype to bfloat16 or float32" in caplog.text


def test_freed_memory_is_kept_where_malloc_can(monkeypatch):
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()


def test_an_object_of_other_sources_or_of_another_version_is_refused(tmp_path):
    if not (FOLDER / "plain.so").exists():
        pytest.skip("the worker was installed without kernels")
    shutil.copy(FOLDER / "plain.so", tmp_path)
    for path in FOLDER.glob("*.[ch]"):
        shutil.copy(path, tmp_path)
    assert isinstance(load_kernels.__wrapped__("plain", cpu_flags(), tmp_path), Kernels)

    with (tmp_path / "kernels.c").open("a") as file:
        file.write("/* a change */\n")
    again = NoKernels("kernels plain.so are of another version of the worker: install it again")
    assert load_kernels.__wrapped__("plain", cpu_flags(), tmp_path) == again

    other = next(Path(torch.__file__).parent.glob("lib/libc10.so"))
    (tmp_path / "plain.so").unlink()
    (tmp_path / "plain.so").symlink_to(other)
    assert load_kernels.__wrapped__("plain", cpu_flags(), tmp_path) == again


def test_kernels_that_are_loaded_twice_free_a_thread_s_memory_once():
    ended = subprocess.run(
        [sys.executable, "-m", "tests.worker.model.ops.loaded_twice"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
