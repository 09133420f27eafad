"""The device of an engine: what is asked for or a refusal with the fix, and never another one."""

from pathlib import Path

import pytest
import torch

from pdcluster_worker.config.worker import RequestedDevice
from pdcluster_worker.errors import ConfigError, DeviceError
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.model.device import (
    MachineFacts,
    check_computes_on,
    check_kv_dtype,
    choose,
    read_facts,
)
from pdcluster_worker.model.ops.kernel_object import cpu_info

GPU = MachineFacts("Xeon", built="13.2", gpu="NVIDIA B200")


@pytest.mark.parametrize(
    ("device", "gpu", "kind"),
    [
        ("auto", "cpu", "cpu"),
        ("auto", "B200", "cuda"),
        ("cpu", "cpu", "cpu"),
        ("cpu", "B200", "cpu"),
        ("cuda", "B200", "cuda"),
    ],
)
def test_auto_is_cuda_where_the_pool_has_an_accelerator(device, gpu, kind):
    note = "not tested on this GPU by the project, but on H200"
    expected = {"cpu": DeviceFacts("cpu", "Xeon"), "cuda": DeviceFacts("cuda", "NVIDIA B200", note)}
    assert choose(RequestedDevice(device, gpu, "main"), GPU) == expected[kind]


@pytest.mark.parametrize(
    ("num_ranks", "note"), [(1, ""), (2, "not tested on several GPUs by the project")]
)
def test_a_gpu_that_was_run_on_has_no_note_but_of_ranks(num_ranks: int, note: str) -> None:
    facts = MachineFacts("Xeon", built="13.0", gpu="NVIDIA H200")
    requested = RequestedDevice("auto", "H200", "main")
    assert choose(requested, facts, num_ranks) == DeviceFacts("cuda", "NVIDIA H200", note)


def test_fp8_is_refused_on_a_gpu_without_it_by_name_with_the_fix() -> None:
    old = MachineFacts("Xeon", built="13.0", gpu="NVIDIA A100-SXM4-80GB", capability=(8, 0))
    with pytest.raises(ConfigError) as refused:
        check_kv_dtype("fp8_e4m3", "cuda", old)
    assert str(refused.value) == (
        "engine.kvCacheDtype is fp8_e4m3, which needs a GPU of compute capability 8.9 or newer, "
        "and NVIDIA A100-SXM4-80GB has 8.0: set engine.kvCacheDtype: int8 for all roles, or use "
        "another GPU"
    )
    for dtype, kind, capability in (
        ("int8", "cuda", (8, 0)),
        ("fp8_e4m3", "cuda", (9, 0)),
        ("fp8_e4m3", "cuda", None),
        ("fp8_e4m3", "cpu", (8, 0)),
    ):
        check_kv_dtype(dtype, kind, MachineFacts("Xeon", gpu="A", capability=capability))


def test_a_compiler_is_one_that_triton_finds(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert not read_facts(needs_cuda=False).compiler
    (tmp_path / "gcc").touch(mode=0o755)
    assert read_facts(needs_cuda=False).compiler


@pytest.mark.parametrize(
    ("facts", "reason", "fix"),
    [
        (MachineFacts("Xeon"), "torch of this image is built without CUDA", "cuda variant"),
        (
            MachineFacts(
                "Xeon",
                "13.2",
                fault="The NVIDIA driver on your system is too old (found version 12040).",
            ),
            "the node's driver is too old for CUDA 13.2",
            "update the driver",
        ),
        (
            MachineFacts("Xeon", "13.2", fault="Found no NVIDIA driver on your system."),
            "no CUDA device is visible",
            "device plugin",
        ),
        (
            MachineFacts("Xeon", "13.2", fault="No CUDA GPUs are available"),
            "no CUDA device is visible",
            "device plugin",
        ),
        (MachineFacts("Xeon", "13.2"), "no CUDA device is visible", "device plugin"),
        (
            MachineFacts("Xeon", "13.2", gpu="NVIDIA B200", triton=False),
            "Triton, which makes the kernels, is not in this image",
            "cuda variant",
        ),
        (
            MachineFacts("Xeon", "13.2", gpu="NVIDIA B200", compiler=False),
            "no C compiler is in this image",
            "gcc",
        ),
    ],
)
def test_missing_cuda_is_refused_with_the_fix(facts, reason, fix):
    with pytest.raises(DeviceError) as refusal:
        choose(RequestedDevice("auto", "B200", "big"), facts)

    assert reason in str(refusal.value)
    assert fix in str(refusal.value)
    assert len(str(refusal.value)) < 400  # what a condition shows of it


@pytest.mark.parametrize(
    ("device", "cache"),
    [(DeviceFacts("cuda", "NVIDIA B200"), "cpu"), (DeviceFacts("cpu", "Xeon"), "cuda")],
)
def test_engine_whose_cache_is_elsewhere_is_refused(device, cache):
    with pytest.raises(
        DeviceError, match=rf"is to compute on {device.kind} .*are on {cache}: use a worker image"
    ):
        check_computes_on(device, torch.device(cache))
    check_computes_on(device, torch.device(device.kind, 0))


def test_cpu_asks_nothing_of_cuda():
    assert choose(
        RequestedDevice("cpu", "B200", "big"),
        MachineFacts("Xeon", fault="No CUDA GPUs are available"),
    ) == DeviceFacts("cpu", "Xeon")


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: Xeon @ 2.00GHz\nmodel name\t: other\n", "Xeon @ 2.00GHz"),
        ("processor\t: 0\nBogoMIPS\t: 243.75\nCPU part\t: 0xd4f\n", ""),
        ("model name\t:\n", ""),
    ],
)
def test_cpu_name_is_read(cpuinfo, name, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda path, **_: cpuinfo)
    assert cpu_info("model name") == name


def test_facts_of_this_machine_name_its_processor():
    facts = read_facts(needs_cuda=False)

    assert facts.cpu
    assert (facts.gpu, facts.fault) == ("", None)


def test_facts_say_why_there_is_no_cuda():
    facts = read_facts(needs_cuda=True)

    assert facts.gpu or facts.fault or facts.built is None  # of whichever machine this runs on
