"""GPUs that a server process reports: its own, or those of a stock engine's container."""

import pytest

from pdcluster_worker.config.engine import EngineConfig, VllmConfig
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.processes import server_process
from pdcluster_worker.processes.server_process import gpu_use
from pdcluster_worker.system.nvidia import GpuUse, parse_report

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
def test_gpus_are_those_that_the_engine_computes_on(monkeypatch, engine, use):
    monkeypatch.setattr(server_process, "Gpus", OwnGpus)
    monkeypatch.setattr(server_process, "read_report", lambda: parse_report("B200, 8, 4, 50, 9"))
    requested = gpu_use(engine, DeviceFacts("cuda", "B200"))

    assert requested is not None
    assert requested() == use
    for kind in ("cpu", "unknown", "rocm"):
        assert gpu_use(engine, DeviceFacts(kind, "")) is None
