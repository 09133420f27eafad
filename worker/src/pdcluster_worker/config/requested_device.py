"""The device that the engine file requests; refuses a GPU on a node without one, before torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pdcluster_worker.config.worker import NO_ACCELERATOR, WorkerConfig
from pdcluster_worker.errors import DeviceError
from pdcluster_worker.system.nvidia import count_gpus

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class RequestedDevice:
    """gpu: the pool's type of accelerator."""

    device: Literal["auto", "cpu", "cuda"]
    gpu: str
    pool: str

    @property
    def kind(self) -> Kind:
        """`auto` is cuda where the pool has an accelerator, else cpu."""
        if self.device == "auto":
            return "cpu" if self.gpu == NO_ACCELERATOR else "cuda"
        return self.device

    def __str__(self) -> str:
        how = f"engine.device: {self.device} with gpu: {self.gpu}"
        return f"pool {self.pool} asks for {self.kind} ({how})"


def requested_device(config: WorkerConfig) -> RequestedDevice:
    return RequestedDevice(config.engine.device, config.gpu, config.pool)


def check_gpu(requested: RequestedDevice, count: Callable[[], int] | None = None) -> None:
    """Raise DeviceError where cuda is requested and the driver shows no GPU."""
    if requested.kind == "cuda" and (count or count_gpus)() == 0:
        fix = (
            "check the node's driver and device plugin, and that the pod requests an accelerator, "
            "use a pool with gpu: cpu, or set engine.device: cpu, which leaves the accelerators "
            "idle"
        )
        raise DeviceError(f"{requested}, but no CUDA device is visible: {fix}")
