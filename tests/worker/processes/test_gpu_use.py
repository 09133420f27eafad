"""GPUs that a server process reports: its own, or those of a stock engine's container."""

import pytest

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.vllm import VllmConfig
from pdcluster_worker.machine.gpu_report import parse_report
from pdcluster_worker.machine.nvidia import GpuUse
from pdcluster_worker.messages.facts import Device
from pdcluster_worker.processes import server_process
from pdcluster_worker.processes.server_process import gpu_use

OWN, BESIDE = GpuUse(1, 8, 0.25), parse_report("B200, 8, 4, 50, 9").use()


class OwnGpus:
    def __init__(self, num: int) -> None:
        assert num == 4

    def use(self) -> GpuUse:
        return OWN


@pytest.mark.parametrize(
    ("engine", "use"),
    [
        (EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2), OWN),
        (EngineConfig(type="vllm"), BESIDE),
        (
            EngineConfig(type="vllm", vllm=VllmConfig(command=("vllm",)), tensor_parallel_size=4),
            OWN,
        ),
    ],
    ids=["ours", "container", "process"],
)
def test_gpus_are_those_that_the_engine_computes_on(
    monkeypatch: pytest.MonkeyPatch, engine: EngineConfig, use: GpuUse
) -> None:
    monkeypatch.setattr(server_process, "Gpus", OwnGpus)
    monkeypatch.setattr(server_process, "read_report", lambda: parse_report("B200, 8, 4, 50, 9"))
    asked = gpu_use(engine, Device("cuda", "B200"))

    assert asked is not None
    assert asked() == use
    for kind in ("cpu", "unknown", "rocm"):
        assert gpu_use(engine, Device(kind, "")) is None
