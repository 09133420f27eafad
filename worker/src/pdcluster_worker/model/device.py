"""Chooses the device of an engine before weights are loaded, or refuses with the fix."""

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass, replace

import torch

from pdcluster_worker.config.engine import KvCacheDtype
from pdcluster_worker.config.worker import RequestedDevice, WorkerConfig, requested_device
from pdcluster_worker.errors import ConfigError, DeviceError
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.model.ops.kernel_object import cpu_info

TESTED_ON = ("H200",)  # GPUs that passed `make gpu-run`; others are reported as untested

_OLD_DRIVER = "too old"  # part of CUDA's own message for an old driver


@dataclass(frozen=True, slots=True)
class MachineFacts:
    cpu: str  # name of the processor
    built: str | None = None  # CUDA version of torch; None = built without CUDA
    fault: str | None = None  # why CUDA cannot be used; None = it can
    gpu: str = ""  # name of the first CUDA device
    capability: tuple[int, int] | None = None  # of it; None = unknown
    triton: bool = True  # is installed
    compiler: bool = True  # a C compiler, which Triton needs


def choose(requested: RequestedDevice, facts: MachineFacts, num_ranks: int = 1) -> DeviceFacts:
    """Raises DeviceError with the reason and the fix."""
    if requested.kind == "cpu":
        return DeviceFacts("cpu", facts.cpu)
    refusal = _refusal(facts)
    if refusal is not None:
        raise DeviceError(f"{requested}, but {refusal}")
    return DeviceFacts("cuda", facts.gpu, _untested(facts.gpu, num_ranks))


_FP8_FROM = (8, 9)  # compute capability with instructions for e4m3: Ada, Hopper and newer


def check_kv_dtype(kv_dtype: KvCacheDtype, kind: str, facts: MachineFacts) -> None:
    """Raises ConfigError for a dtype that the GPU lacks; CPUs have all of them."""
    capability = facts.capability
    if kind == "cuda" and kv_dtype == "fp8_e4m3" and capability and capability < _FP8_FROM:
        found, needed = (".".join(map(str, each)) for each in (capability, _FP8_FROM))
        raise ConfigError(
            f"engine.kvCacheDtype is fp8_e4m3, which needs a GPU of compute capability {needed} or "
            f"newer, and {facts.gpu} has {found}: set engine.kvCacheDtype: int8 for all roles, or "
            "use another GPU"
        )


def check_computes_on(device: DeviceFacts, cache: torch.device) -> None:
    """Raises DeviceError where the KV cache is on another device."""
    if cache.type != device.kind:
        raise DeviceError(
            f"this engine is to compute on {device.kind} ({device.name}), but its model and KV "
            f"cache are on {cache.type}: "
            "use a worker image that computes there, or set engine.device: cpu, which leaves the "
            "accelerators idle"
        )


def find_device(config: WorkerConfig) -> DeviceFacts:
    """Raises DeviceError, or ConfigError for a `kvCacheDtype` that the device lacks."""
    requested = requested_device(config)
    facts = read_facts(needs_cuda=requested.kind == "cuda")
    check_kv_dtype(config.engine.kv_cache_dtype, requested.kind, facts)
    return choose(requested, facts, config.engine.num_ranks)


def read_facts(*, needs_cuda: bool) -> MachineFacts:
    """CUDA is queried only when requested, since that takes memory of the device."""
    found = MachineFacts(
        cpu_info("model name") or platform.machine(),  # arm64 names none
        torch.version.cuda,
        triton=importlib.util.find_spec("triton") is not None,
        compiler=bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")),
    )
    if not needs_cuda or torch.version.cuda is None:
        return found
    try:
        capability = torch.cuda.get_device_capability(0)
        return replace(found, gpu=torch.cuda.get_device_name(0), capability=capability)
    except Exception as e:  # the driver, the runtime and torch each raise in their own way
        return replace(found, fault=" ".join(str(e).split()) or type(e).__name__)


def _untested(gpu: str, num_ranks: int) -> str:
    if not any(name in gpu for name in TESTED_ON):
        return f"not tested on this GPU by the project, but on {', '.join(TESTED_ON)}"
    return "not tested on several GPUs by the project" if num_ranks > 1 else ""


def _refusal(facts: MachineFacts) -> str | None:
    """Reason that CUDA cannot be used, and the fix: the first that holds."""
    variant = "use the worker image's cuda variant"
    refusals = (
        (facts.built is None, f"torch of this image is built without CUDA: {variant}"),
        (
            _OLD_DRIVER in (facts.fault or ""),
            f"the node's driver is too old for CUDA {facts.built} of this image: update the driver",
        ),
        (
            facts.fault is not None or not facts.gpu,
            "no CUDA device is visible: check the node's driver and device plugin, and that the "
            "pod requests an accelerator",
        ),
        (
            not facts.triton,
            f"Triton, which makes the kernels, is not in this image: {variant}",
        ),
        (
            not facts.compiler,
            "no C compiler is in this image, without which Triton runs no kernel: "
            f"{variant}, or install gcc and libc6-dev",
        ),
    )
    return next((text for holds, text in refusals if holds), None)
