"""Device of a stock engine: by its build, and by what its container's GPUs hold."""

import pytest

from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.stock_engine import facts
from pdcluster_worker.stock_engine.facts import device_of, read_device
from pdcluster_worker.system.nvidia import GpuReport, parse_report

BUSY, IDLE = "NVIDIA B200, 183359, 165000, 42, 17\n", "NVIDIA B200, 183359, 4, 0, 0\n"


def reports(*texts: str) -> list[GpuReport]:
    return [parse_report(text) for text in texts]


async def read(version: str, *texts: str, gpu: str = "B200") -> DeviceFacts:
    coming = iter(reports(*texts))
    return await read_device("SGLang", version, gpu, lambda: next(coming))


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.32.1.dev3+g0123abc.cpu", "0.32.0+cpu.mine"])
async def test_a_build_for_cpus_computes_on_one_whatever_its_pool_has(version: str) -> None:
    assert await read(version) == DeviceFacts("cpu", "cpu")


@pytest.mark.parametrize(
    ("version", "kind"), [("0.32.0+rocm700", "rocm"), ("0.32.0+tpu", "tpu"), ("0.32.0+xpu", "xpu")]
)
async def test_a_build_for_another_accelerator_names_it(version: str, kind: str) -> None:
    assert await read(version) == DeviceFacts(kind, kind)


async def test_an_engine_of_a_pool_without_accelerators_computes_on_its_cpu() -> None:
    assert await read("0.32.0", gpu="cpu") == DeviceFacts("cpu", "cpu")


async def test_a_build_for_cuda_computes_on_the_gpus_that_hold_memory() -> None:
    assert await read("0.32.0", BUSY * 8) == DeviceFacts(
        "cuda", "8 x NVIDIA B200", note="179 GiB each"
    )
    assert await read("0.32.0+cu129", BUSY + IDLE) == DeviceFacts(
        "cuda", "NVIDIA B200", note="179 GiB each; 1 more hold nothing"
    )


def test_gpus_that_hold_nothing_are_not_what_it_computes_on() -> None:
    assert device_of(parse_report(IDLE * 8), "vLLM") == DeviceFacts(
        "cpu", "cpu", note="it serves, and 8 x NVIDIA B200 of its container hold nothing"
    )


async def test_a_report_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "POLL_SECONDS", 0.001)

    assert (await read("0.32.0", "", "no answer within 3 s", BUSY)).kind == "cuda"


async def test_without_a_report_it_is_unknown_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(facts, "REPORT_SECONDS", 0.003)

    found = await read("0.32.0", *["No devices were found"] * 4)
    assert found == DeviceFacts(
        "unknown", "", note="SGLang does not say it, and nvidia-smi: No devices were found"
    )
