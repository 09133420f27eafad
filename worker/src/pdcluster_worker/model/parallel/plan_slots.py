"""Plans of steps in shared memory; a slot is reused after every rank has answered for its plan."""

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

LEAST_ROWS = 64  # for the logits check at load, which has a plan of its own


@dataclass(frozen=True, slots=True)
class PlanSizes:
    slot: int
    num_tokens: int
    num_decodes: int
    longest: int
    num_rows: int  # with padding
    num_sequences: int
    num_samples: int
    width: int  # blocks of each table

    def encode(self) -> bytes:
        numbers = self.slot, self.num_tokens, self.num_decodes, self.longest
        return _SIZES.pack(
            *numbers, self.num_rows, self.num_sequences, self.num_samples, self.width
        )

    @classmethod
    def decode(cls, data: bytes) -> "PlanSizes":
        return cls(*_SIZES.unpack(data))


class PlanSlots:
    def __init__(self, memory: mmap.mmap, limits: StepLimits) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes(limits)
        self._block_size = limits.block_size

    def write(self, plan: StepPlan, slot: int) -> PlanSizes:
        """No rank may read the slot any more."""
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
        """Tensors are views of the shared memory."""
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
        """Views: rows and `sample_at`; firsts, lengths, contexts, table rows; tables."""
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
    """Bytes of the largest plan with every row sampled."""
    rows, sequences = max(limits.rows, LEAST_ROWS), max(limits.sequences, LEAST_ROWS)
    narrow = 4 * (4 + max(limits.blocks, LEAST_ROWS)) * sequences
    return 4 * 8 * rows + -(-narrow // 8) * 8  # the next slot begins with 8-byte integers
