"""Messages between rank 0 and another rank of its engine: packets over a socket pair.

To a rank: setup, cache, then steps and warm-ups.  Each is answered by DONE, or FAILED and a reason.
"""

import mmap
import socket
import struct
from collections.abc import Sequence
from typing import Final

import msgspec
import torch

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import ModelConfig
from pdcluster_worker.model.step_plan import PlanSizes, StepLimits, StepPlan, read_plan, write_plan

DONE: Final = b"+"
FAILED: Final = b"!"
STEP: Final = b"S"
WARM_UP: Final = b"W"
MAX_BYTES = 64 << 10  # of one message; a plan's arrays travel by shared memory

_SLOT = struct.Struct("!10I")  # the slot's number, and `PlanSizes`


class RankSetup(msgspec.Struct, frozen=True):
    """First message.  store: rendezvous file of the ranks."""

    rank: int
    model: ModelConfig
    engine: EngineConfig
    device: str
    threads: int
    store: str


_encode = msgspec.json.Encoder().encode
decode_setup = msgspec.json.Decoder(RankSetup).decode


def send_setup(control: socket.socket, setup: RankSetup) -> None:
    control.send(_encode(setup))


def send_cache(control: socket.socket, num_blocks: int, descriptors: Sequence[int]) -> None:
    """Second message: of the plan slots' memory and, on CPUs, of the shared KV cache."""
    socket.send_fds(control, [_encode(num_blocks)], descriptors)


def receive_cache(control: socket.socket) -> tuple[int, Sequence[int]] | None:
    """KV blocks, and descriptors; None where rank 0 is gone."""
    data, descriptors, _, _ = socket.recv_fds(control, MAX_BYTES, 2)
    return (int(data), descriptors) if data else None


class PlanSlots:
    """Plans of steps in shared memory; a slot is reused after every rank answered for its plan."""

    def __init__(self, memory: mmap.mmap, limits: StepLimits) -> None:
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._slot_bytes = limits.plan_bytes
        self._block_size = limits.block_size

    def write(self, plan: StepPlan, slot: int) -> bytes:
        """Returns the argument of `read` for other ranks."""
        return _SLOT.pack(slot, *write_plan(plan, self._slot(slot), self._block_size))

    def read(self, written: bytes) -> StepPlan:
        """Tensors are views of the shared memory."""
        slot, *sizes = _SLOT.unpack(written)
        return read_plan(self._slot(slot), PlanSizes(*sizes))

    def _slot(self, slot: int) -> torch.Tensor:
        return self._memory[slot * self._slot_bytes :]
