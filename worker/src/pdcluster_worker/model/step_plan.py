"""From a batch to the plan of one step: all scheduled tokens in one flat row.

One scheduled token is a decode, more are a prefill chunk, each draft is a decode of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.engine.request import Batch, Scheduled

NO_SLOT = -1  # of a padding row
NO_ADAPTER = -1  # of a row that the model alone computes
NO_ROWS, NO_RUNS = torch.empty(0, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int32)


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
    adapter_rows: Tensor = NO_ROWS  # [A] int64, rows of LoRA adapters, one adapter's together
    adapter_runs: Tensor = NO_RUNS  # [G, 2] int32 on the CPU: an adapter and its number of rows


def padded_rows(num_tokens: int) -> int:
    """Few sizes, all warmed up at start: compiling a product for a new size takes milliseconds."""
    if num_tokens <= 16:
        return 1 << (num_tokens - 1).bit_length()
    step = 16 if num_tokens <= 128 else 32 if num_tokens <= 512 else 128
    return -(-num_tokens // step) * step


def row_sizes(max_tokens: int) -> list[int]:
    """Every value of `padded_rows` up to `max_tokens`, ascending."""
    return sorted({padded_rows(num_tokens) for num_tokens in range(1, max_tokens + 1)})


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that a device must be ready for; rows and sequences are padded."""

    max_tokens: int
    max_sequences: int
    longest: int  # tokens of the longest context
    block_size: int
    max_decode_rows: int = 0  # with drafts, each a sequence to the kernels; 0 = max_sequences

    @classmethod
    def of(cls, engine: EngineConfig, max_model_len: int) -> "StepLimits":
        return cls(
            engine.max_batched_tokens,
            engine.max_sequences,
            max_model_len,
            engine.block_size,
            engine.max_decode_rows,
        )

    @property
    def rows(self) -> int:
        return padded_rows(max(self.max_tokens, self.max_sequences, self.max_decode_rows))

    @property
    def sequences(self) -> int:
        return padded_rows(max(self.max_sequences, self.max_decode_rows))

    @property
    def blocks(self) -> int:
        return -(-self.longest // self.block_size)

    @property
    def plan_bytes(self) -> int:
        """Bytes of the largest plan in one piece of memory; each row may be sampled."""
        most = self.rows
        return PlanSizes(0, 0, 0, most, self.sequences, most, self.blocks, most, most).num_bytes


class PlanSizes(NamedTuple):
    """Sizes of a plan in one piece of memory: int64 and int32 arrays, then block tables."""

    num_tokens: int
    num_decodes: int
    longest: int
    num_rows: int  # with padding
    num_sequences: int
    num_samples: int
    width: int  # blocks of each table
    num_adapter_rows: int
    num_adapter_runs: int

    @property
    def num_bytes(self) -> int:
        """Whole 8-byte words, so that another plan may follow."""
        narrow = (4 + self.width) * self.num_sequences + 2 * self.num_adapter_runs
        wide = 3 * self.num_rows + self.num_samples + self.num_adapter_rows
        return 8 * (wide + (narrow + 1) // 2)

    def arrays(self, memory: Tensor) -> dict[str, Tensor]:
        """Views by name.  memory: `num_bytes` uint8."""
        rows, sequences = self.num_rows, self.num_sequences
        wide = dict.fromkeys(("token_ids", "positions", "slots"), rows)
        narrow = dict.fromkeys(("firsts", "lengths", "contexts", "table_rows"), sequences)
        found, start = dict[str, Tensor](), 0
        wide |= {"sample_at": self.num_samples, "adapter_rows": self.num_adapter_rows}
        narrow |= {"adapter_runs": 2 * self.num_adapter_runs, "tables": sequences * self.width}
        for dtype, counts in ((torch.int64, wide), (torch.int32, narrow)):
            for name, count in counts.items():
                end = start + count * dtype.itemsize
                found[name] = memory[start:end].view(dtype)
                start = end
        return found


def write_plan(plan: StepPlan, memory: Tensor, block_size: int) -> PlanSizes:
    """Copy a plan on the host into `memory`, uint8, also on the host."""
    width = -(-plan.longest // block_size)
    sizes = PlanSizes(
        *(plan.num_tokens, plan.num_decodes, plan.longest),
        *(len(plan.token_ids), len(plan.firsts), len(plan.sample_at), width),
        *(len(plan.adapter_rows), len(plan.adapter_runs)),
    )
    arrays = {name: array.numpy() for name, array in sizes.arrays(memory).items()}
    tables = arrays.pop("tables").reshape(-1, width)
    rows = plan.table_rows.numpy()
    np.take(plan.tables[:, :width].numpy(), rows, axis=0, out=tables, mode="clip")
    arrays.pop("table_rows")[:] = np.arange(len(rows), dtype=np.int32) * width
    for name, array in arrays.items():
        array[:] = getattr(plan, name).numpy().reshape(-1)
    return sizes


def read_plan(memory: Tensor, sizes: PlanSizes) -> StepPlan:
    """A plan of views; in `tables[table_row]` blocks of other sequences follow.

    The strides do not depend on the plan: there is a table for each place where one may begin.
    """
    arrays = sizes.arrays(memory)
    num_tables = (sizes.num_sequences - 1) * sizes.width + 1
    arrays["tables"] = arrays["tables"].as_strided((num_tables, sizes.width), (1, 1))
    arrays["adapter_runs"] = arrays["adapter_runs"].view(sizes.num_adapter_runs, 2)
    return StepPlan(sizes.num_tokens, sizes.num_decodes, sizes.longest, **arrays)


@dataclass(slots=True)
class _TableRow:
    """table: the list whose first `num_copied` ids were copied."""

    row: int
    table: list[int]
    num_copied: int = 0


class StepPlanner:
    """Keeps its arrays and the block tables of recent requests.

    adapters: their places, by name; others may come and go.
    """

    def __init__(
        self,
        limits: StepLimits,
        *,
        pads: bool = True,
        adapters: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._size = limits.block_size
        self._pads = pads
        self._adapters = adapters
        rows, sequences = padded_rows(limits.max_tokens), limits.max_sequences
        self._rows = np.zeros((3, rows), np.int64)
        self._sequences = np.zeros((4, max(sequences, limits.max_decode_rows)), np.int32)
        self._tables = np.zeros((sequences, limits.blocks), np.int32)
        self._entries: dict[str, _TableRow] = {}
        self._free = list(range(sequences))

    def plan(self, batch: Batch) -> StepPlan:
        items, size = batch.items, self._size
        token_ids, positions, slots = self._rows
        table_rows = self._entries_of(items)
        firsts: list[int] = []
        row = 0
        for item in items:
            start, end = item.start, item.end
            firsts.append(row)
            last = row + end - start
            if last == row + 1:
                known = item.request.tokens
                # the step before samples it
                token_ids[row] = known[start] if start < len(known) else 0
                positions[row] = start
            else:
                token_ids[row:last] = item.token_ids
                positions[row:last] = np.arange(start, end)
            row = last
        entries = np.repeat(table_rows, [item.num_tokens for item in items])
        blocks, offsets = np.divmod(positions[:row], size)
        slots[:row] = self._tables[entries, blocks].astype(np.int64) * size + offsets
        padded = padded_rows(row) if self._pads else row
        token_ids[row:padded], positions[row:padded], slots[row:padded] = 0, 0, NO_SLOT
        plan = self._finish(items, table_rows, firsts, row, padded)
        if not self._adapters or not any(item.request.adapter for item in items):
            return plan
        return _with_adapters(plan, self._adapters_of(items))

    def _adapters_of(self, items: Sequence[Scheduled]) -> NDArray[np.int32]:
        """The adapter of each row; NO_ADAPTER = none."""
        names = [item.request.adapter for item in items]
        found = [self._adapters[name] if name else NO_ADAPTER for name in names]
        return np.repeat(np.array(found, np.int32), [item.num_tokens for item in items])

    def forget(self, request_id: str) -> None:
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
        rows = torch.from_numpy(self._rows[:, :padded])
        sequences = torch.from_numpy(self._sequences[:, :count])
        return StepPlan(
            num_tokens=num_tokens,
            num_decodes=[sequence[1] for sequence in sequences_of].count(1),
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
            for request_id in self._entries.keys() - scheduled:
                self.forget(request_id)
        return self._free.pop()


def _with_adapters(plan: StepPlan, adapters: NDArray[np.int32]) -> StepPlan:
    """adapters: of each row; NO_ADAPTER = none."""
    rows = np.flatnonzero(adapters != NO_ADAPTER)
    rows = rows[np.argsort(adapters[rows], kind="stable")]
    found, counts = np.unique(adapters[rows], return_counts=True)
    runs = np.stack((found, counts), axis=1).astype(np.int32)
    return replace(plan, adapter_rows=torch.from_numpy(rows), adapter_runs=torch.from_numpy(runs))


def plan_parts(plan: StepPlan, count: int) -> list[StepPlan]:
    """At most `count` plans, of about equally many rows each; a cut may split a sequence."""
    count = min(count, plan.num_tokens)
    if count <= 1:
        return [plan]
    edges = [plan.num_tokens * index // count for index in range(count + 1)]
    return [_part(plan, first, last) for first, last in pairwise(edges)]


def _part(plan: StepPlan, first: int, last: int) -> StepPlan:
    """Rows [first, last) of a plan."""
    firsts, ends = plan.firsts.numpy(), plan.firsts.numpy() + plan.lengths.numpy()
    starts, stops = np.maximum(firsts, first), np.minimum(ends, last)
    lengths = stops - starts
    contexts = plan.contexts.numpy() - (ends - stops)  # up to and with its last row here
    inside = np.flatnonzero(lengths > 0)
    order = inside[np.argsort(lengths[inside] > 1, kind="stable")]  # decodes first
    samples = plan.sample_at[(plan.sample_at >= first) & (plan.sample_at < last)] - first
    rows = padded_rows(last - first)
    part = replace(
        plan,
        num_tokens=last - first,
        num_decodes=int((lengths[inside] == 1).sum()),
        longest=int(contexts[inside].max()),
        token_ids=_rows(plan.token_ids[first:last], rows, 0),
        positions=_rows(plan.positions[first:last], rows, 0),
        slots=_rows(plan.slots[first:last], rows, NO_SLOT),
        firsts=_narrow((starts - first)[order]),
        lengths=_narrow(lengths[order]),
        contexts=_narrow(contexts[order]),
        table_rows=_narrow(plan.table_rows.numpy()[order]),
        sample_at=samples,
    )
    if not len(plan.adapter_runs):
        return part
    adapters = np.full(plan.num_tokens, NO_ADAPTER, np.int32)
    adapters[plan.adapter_rows.numpy()] = np.repeat(*plan.adapter_runs.numpy().T)
    return _with_adapters(part, adapters[first:last])


def _rows(values: Tensor, num_rows: int, padding: int) -> Tensor:
    return functional.pad(values, (0, num_rows - len(values)), value=padding)


def _narrow(values: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
