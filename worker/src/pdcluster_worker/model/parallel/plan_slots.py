"""Plans of steps in memory that all ranks map: rank 0 writes one, the others read it where it lies.

A slot is written again only after every rank has answered for its plan, so what
is read does not change.  Block tables are written for the sequences of the step
and as far as their longest context.
"""

import mmap
import struct
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.model.step_plan import StepPlan

_ROWS = ("token_ids", "positions", "slots")
_SEQUENCES = ("firsts", "lengths", "contexts")
_SIZES = struct.Struct("!8I")

LEAST_ROWS = 64
"""Room for the proof at load, which has a plan of its own."""


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """Sizes with which a rank reads a slot.

    num_rows: padding included.  width: blocks of each table.
    """

    slot: int
    num_tokens: int
    num_decodes: int
    longest: int
    num_rows: int
    num_sequences: int
    num_samples: int
    width: int

    def encode(self) -> bytes:
        """Encode for the control socket."""
        numbers = self.slot, self.num_tokens, self.num_decodes, self.longest
        return _SIZES.pack(
            *numbers, self.num_rows, self.num_sequences, self.num_samples, self.width
        )

    @classmethod
    def decode(cls, data: bytes) -> "PlanSizes":
        """The inverse of `encode`."""
        return cls(*_SIZES.unpack(data))


class PlanSlots:
    """All slots of one engine, as one of its processes maps them."""

    def __init__(self, memory: mmap.mmap, limits: StepLimits) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes(limits)
        self._block_size = limits.block_size

    def write(self, plan: StepPlan, slot: int) -> PlanSizes:
        """Copy a plan into a slot that no rank reads any more."""
        width = -(-plan.longest // self._block_size)
        sizes = PlanSizes(
            slot,
            plan.num_tokens,
            plan.num_decodes,
            plan.longest,
            len(plan.token_ids),
            len(plan.firsts),
            len(plan.sample_at),
            width,
        )
        wide, narrow, tables = self._arrays(sizes)
        for row, name in zip(wide, (*_ROWS, "sample_at"), strict=True):
            row[:] = getattr(plan, name).numpy()
        for array, name in zip(narrow, _SEQUENCES, strict=False):
            array[:] = getattr(plan, name).numpy()
        narrow[3][:] = np.arange(sizes.num_sequences)
        np.take(
            plan.tables[:, :width].numpy(), plan.table_rows.numpy(), axis=0, out=tables, mode="clip"
        )
        return sizes

    def read(self, sizes: PlanSizes) -> StepPlan:
        """The plan of a slot; its tensors are views of the shared memory."""
        wide, narrow, tables = self._arrays(sizes)
        token_ids, positions, slots, sample_at = map(torch.from_numpy, wide)
        firsts, lengths, contexts, table_rows = map(torch.from_numpy, narrow)
        return StepPlan(
            num_tokens=sizes.num_tokens,
            num_decodes=sizes.num_decodes,
            longest=sizes.longest,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            firsts=firsts,
            lengths=lengths,
            contexts=contexts,
            table_rows=table_rows,
            tables=torch.from_numpy(tables),
            sample_at=sample_at,
        )

    def _arrays(
        self, sizes: PlanSizes
    ) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int32]], NDArray[np.int32]]:
        """Views of the slot: rows and `sample_at`; firsts, lengths, contexts, seats; tables."""
        start = sizes.slot * self._slot_bytes
        wide: list[NDArray[np.int64]] = []
        for count in (sizes.num_rows,) * 3 + (sizes.num_samples,):
            wide.append(np.frombuffer(self._memory, np.int64, count, start))
            start += 8 * count
        narrow: list[NDArray[np.int32]] = []
        for _ in range(4):
            narrow.append(np.frombuffer(self._memory, np.int32, sizes.num_sequences, start))
            start += 4 * sizes.num_sequences
        tables = np.frombuffer(self._memory, np.int32, sizes.num_sequences * sizes.width, start)
        return wide, narrow, tables.reshape(sizes.num_sequences, sizes.width)


def slot_bytes(limits: StepLimits) -> int:
    """Room for the largest plan, every row of it sampled."""
    rows, sequences = max(limits.rows, LEAST_ROWS), max(limits.sequences, LEAST_ROWS)
    narrow = 4 * (4 + max(limits.blocks, LEAST_ROWS)) * sequences
    return 4 * 8 * rows + -(-narrow // 8) * 8  # the next slot begins with 8-byte integers
