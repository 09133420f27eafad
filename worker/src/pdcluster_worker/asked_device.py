"""The device that the engine file asks for, and the refusal of one that no engine of ours computes on.

Needs neither torch nor a look at the machine, so the server process refuses
before it agrees on anything with others.  `IMPLEMENTED` holds the devices that
the code of `model` can compute on; what the machine has is `model.device`'s business.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pdcluster_worker.config import NO_ACCELERATOR, WorkerConfig
from pdcluster_worker.errors import DeviceError

Kind = Literal["cpu", "cuda"]

IMPLEMENTED: frozenset[Kind] = frozenset({"cpu"})


@dataclass(frozen=True, slots=True)
class Asked:
    """What the engine file asks for.

    device: `engine.device`
    gpu:    the pool's type of accelerator
    """

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


def asked_device(config: WorkerConfig, implemented: Collection[Kind] = IMPLEMENTED) -> Asked:
    """What this worker's engine is asked for.  Raises DeviceError for what is not implemented."""
    asked = Asked(config.engine.device, config.gpu, config.pool)
    if asked.kind not in implemented:
        fix = "use a pool with gpu: cpu, or set engine.device: cpu, which leaves the accelerators idle"
        raise DeviceError(f"{asked}, but this engine computes on CPUs only: {fix}")
    return asked
