"""From a batch to the plan of one step: all scheduled tokens in one flat row.

One scheduled token is a decode, more are a prefill chunk, each draft is a decode of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdcluster_worker.engine.request import Batch, Scheduled

NO_SLOT = -1  # of a padding row


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Its tensors are views of kept arrays on the CPU, valid until the next plan."""

    num_tokens: int  # scheduled; the flat row is padded to T >= num_tokens rows
    num_decodes: int  # sequences with one row, which come first
    longest: int  # tokens of the longest context
    token_ids: Tensor  # [T] int64; 0 in padding
    positions: Tensor  # [T] int64; 0 in padding
    slots: Tensor  # [T] int64, block_id * block_size + offset; NO_SLOT in padding
    firsts: Tensor  # [S] int32, first row of each sequence
    lengths: Tensor  # [S] int32, rows of each sequence
    contexts: Tensor  # [S] int32, tokens up to and including its last row
    table_rows: Tensor  # [S] int32, row in `tables`
    tables: Tensor  # [rows, blocks] int32 block ids; stale beyond a context
    sample_at: Tensor  # [R] int64, rows whose logits are needed, in batch order


def padded_rows(num_tokens: int) -> int:
    """Few sizes, all warmed up at start: compiling a product for a new size takes milliseconds."""
    if num_tokens <= 16:
        return 1 << (num_tokens - 1).bit_length()
    step = 16 if num_tokens <= 128 else 32 if num_tokens <= 512 else 128
    return -(-num_tokens // step) * step


def row_sizes(max_tokens: int) -> list[int]:
    """Every value of `padded_rows` up to `max_tokens`, ascending."""
    return sorted({padded_rows(num_tokens) for num_tokens in range(1, max_tokens + 1)})


@dataclass(slots=True)
class _TableRow:
    """table: the list whose first `num_copied` ids were copied."""

    row: int
    table: list[int]
    num_copied: int = 0


class StepPlanner:
    """Keeps its arrays and the block tables of recent requests."""

    def __init__(
        self,
        *,
        block_size: int,
        max_sequences: int,
        max_tokens: int,
        max_blocks: int,
        max_decode_rows: int = 0,
        pads: bool = True,
    ) -> None:
        """max_decode_rows: decodes with drafts, which may exceed max_sequences."""
        self._size = block_size
        self._pads = pads
        rows = padded_rows(max_tokens)
        self._rows = np.zeros((3, rows), np.int64)
        self._sequences = np.zeros((4, max(max_sequences, max_decode_rows)), np.int32)
        self._tables = np.zeros((max_sequences, max_blocks), np.int32)
        self._entries: dict[str, _TableRow] = {}
        self._free = list(range(max_sequences))

    def plan(self, batch: Batch) -> StepPlan:
        """Rows are in the batch's order."""
        items = batch.items
        token_ids, positions, slots = self._rows
        table_rows = self._entries_of(items)
        firsts: list[int] = []
        row = 0
        for item, entry in zip(items, table_rows, strict=True):
            start, end = item.start, item.end
            firsts.append(row)
            last = row + end - start
            if item.drafts:
                token_ids[row:last] = item.token_ids
                positions[row:last] = range(start, end)
                slots[row:last] = [
                    item.request.block_table[at // self._size] * self._size + at % self._size
                    for at in range(start, end)
                ]
            elif last == row + 1:
                known = item.request.tokens
                # the step before samples it
                token_ids[row] = known[start] if start < len(known) else 0
                positions[row] = start
                slots[row] = (
                    item.request.block_table[start // self._size] * self._size + start % self._size
                )
            else:
                token_ids[row:last] = item.request.tokens[start:end]
                positions[row:last] = np.arange(start, end)
                places = positions[row:last]
                slots[row:last] = (
                    self._tables[entry, places // self._size].astype(np.int64) * self._size
                    + places % self._size
                )
            row = last
        padded = padded_rows(row) if self._pads else row
        token_ids[row:padded], positions[row:padded], slots[row:padded] = 0, 0, NO_SLOT
        return self._finish(items, table_rows, firsts, row, padded)

    def forget(self, request_id: str) -> None:
        """Unknown ids are a no-op."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._free.append(entry.row)

    def _finish(
        self,
        items: Sequence[Scheduled],
        table_rows: list[int],
        firsts: list[int],
        num_tokens: int,
        padded: int,
    ) -> StepPlan:
        sequences_of: list[tuple[int, int, int, int]] = []
        sample_at: list[int] = []
        for item, entry, first in zip(items, table_rows, firsts, strict=True):
            last = first + item.num_tokens - 1
            if item.drafts:
                sequences_of += [
                    (first + row, 1, item.start + row + 1, entry) for row in range(item.num_tokens)
                ]
            else:
                sequences_of.append((first, item.num_tokens, item.end, entry))
            if item.samples:
                sample_at += range(last - len(item.drafts), last + 1)
        # Decodes first; the sort keeps the batch's order among them.
        sequences_of.sort(key=lambda sequence: sequence[1] > 1)
        count = len(sequences_of)
        self._sequences[:, :count] = np.array(sequences_of, np.int32).T
        lengths = [sequence[1] for sequence in sequences_of]
        rows = torch.from_numpy(self._rows[:, :padded])
        sequences = torch.from_numpy(self._sequences[:, :count])
        return StepPlan(
            num_tokens=num_tokens,
            num_decodes=lengths.count(1),
            longest=max(item.end for item in items),
            token_ids=rows[0],
            positions=rows[1],
            slots=rows[2],
            firsts=sequences[0],
            lengths=sequences[1],
            contexts=sequences[2],
            table_rows=sequences[3],
            tables=torch.from_numpy(self._tables),
            sample_at=torch.tensor(sample_at, dtype=torch.long),
        )

    def _entries_of(self, items: Sequence[Scheduled]) -> list[int]:
        """Update block tables: a request's table grows at its end, or is another list."""
        rows: list[int] = []
        for item in items:
            request = item.request
            entry = self._entries.get(request.request_id)
            if entry is None:
                entry = self._entries[request.request_id] = _TableRow(
                    self._free_row(items), request.block_table
                )
            elif entry.table is not request.block_table:
                entry.table, entry.num_copied = request.block_table, 0
            needed = -(-item.end // self._size)
            if entry.num_copied < needed:
                self._tables[entry.row, entry.num_copied : needed] = request.block_table[
                    entry.num_copied : needed
                ]
                entry.num_copied = needed
            rows.append(entry.row)
        return rows

    def _free_row(self, items: Sequence[Scheduled]) -> int:
        if not self._free:
            scheduled = {item.request.request_id for item in items}
            for request_id in [
                request_id for request_id in self._entries if request_id not in scheduled
            ]:
                self.forget(request_id)
        return self._free.pop()
