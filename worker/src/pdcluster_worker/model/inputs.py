"""From a batch to the tensors of one forward pass: all scheduled tokens of all requests in one flat row.

A request with one scheduled token is a decode, whatever the token is; others
are prefill chunks.  Decodes are grouped by context length, so that one long
context does not make every short one pay for its padding.  Nothing here
computes; the plan of a step is made once and used by every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdcluster_worker.engine.batch import Batch, Scheduled
from pdcluster_worker.model.kv_cache import KVCache

MIN_PADDING_BLOCKS = 64
"""Padding that is not worth a group of its own: reading it costs about what one more attention call does."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar context length.

    tokens:    [B] places in the flat row.
    read_rows: [B * Hkv * N] KV rows; N = blocks of the longest context.
    mask:      [B, 1, 1, N * block_size], added to the scores; None when every context fills its blocks.
    """

    tokens: Tensor
    read_rows: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several tokens of one request, flat places [first, last).

    context:   tokens up to and with the chunk's last.
    read_rows: [Hkv * N] KV rows of the context; None when the chunk is the whole context.
    mask:      [T, context], added to the scores; None likewise.
    """

    first: int
    last: int
    context: int
    read_rows: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step.

    token_ids, positions: [1, T].
    write_rows:   [Hkv * T] slot rows of the new keys and values.
    sample_at:    [R] flat places whose logits are wanted.
    opened:       blocks whose first slot is written now and whose last is not.
    only_group:   the group, when the step is nothing but decodes in one group in flat order.
    """

    token_ids: Tensor
    positions: Tensor
    write_rows: Tensor
    sample_at: Tensor
    opened: tuple[int, ...]
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]

    @property
    def only_group(self) -> DecodeGroup | None:
        """Its output needs no scattering."""
        return self.groups[0] if len(self.groups) == 1 and not self.chunks else None


def build_inputs(batch: Batch, cache: KVCache) -> StepInputs:
    """Plan one step over the cache.  Token order is the batch's."""
    size = cache.geometry.block_size
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    firsts: list[int] = []
    for item in batch.items:
        firsts.append(len(token_ids))
        token_ids += item.request.tokens[item.start : item.end]
        positions += range(item.start, item.end)
        table = item.request.block_table
        slots += [table[position // size] * size + position % size for position in range(item.start, item.end)]
    placed = list(zip(batch.items, firsts, strict=True))
    return StepInputs(
        token_ids=torch.tensor([token_ids]),
        positions=torch.tensor([positions]),
        write_rows=cache.write_rows(torch.tensor(slots)),
        sample_at=torch.tensor([first + item.num_tokens - 1 for item, first in placed if item.samples], dtype=torch.long),
        opened=tuple(block for item in batch.items for block in opened_blocks(item, size)),
        groups=_decode_groups([(item, first) for item, first in placed if item.num_tokens == 1], cache),
        chunks=tuple(_prefill_chunk(item, first, cache) for item, first in placed if item.num_tokens > 1),
    )


def opened_blocks(item: Scheduled, block_size: int) -> tuple[int, ...]:
    """The block, if any, that this item starts but does not fill: at most its last one."""
    last = (item.end - 1) // block_size
    starts, fills = item.start <= last * block_size, item.end % block_size == 0
    return (item.request.block_table[last],) if starts and not fills else ()


def length_groups(num_blocks: Sequence[int]) -> list[list[int]]:
    """Indices of contexts to attend together, longest first, in original order inside a group.

    A group is cut where the next context is under half its longest and padding
    what is left to that length would read MIN_PADDING_BLOCKS or more.
    """
    order = sorted(range(len(num_blocks)), key=lambda index: -num_blocks[index])
    groups: list[list[int]] = []
    for place, index in enumerate(order):
        longest = num_blocks[groups[-1][0]] if groups else 0
        is_short = num_blocks[index] * 2 < longest
        if not groups or (is_short and sum(longest - num_blocks[other] for other in order[place:]) >= MIN_PADDING_BLOCKS):
            groups.append([])
        groups[-1].append(index)
    return [sorted(group) for group in groups]


def _decode_groups(placed: Sequence[tuple[Scheduled, int]], cache: KVCache) -> tuple[DecodeGroup, ...]:
    size = cache.geometry.block_size
    counts = [-(-item.end // size) for item, _ in placed]
    return tuple(_decode_group([placed[index] for index in group], cache) for group in length_groups(counts))


def _decode_group(placed: Sequence[tuple[Scheduled, int]], cache: KVCache) -> DecodeGroup:
    size = cache.geometry.block_size
    contexts = [item.end for item, _ in placed]
    counts = [-(-context // size) for context in contexts]
    longest = max(counts)
    # Padding repeats a request's own first block: no other request's block is ever read, and a cached one is cheap.
    tables = [
        item.request.block_table[:count] + [item.request.block_table[0]] * (longest - count)
        for (item, _), count in zip(placed, counts, strict=True)
    ]
    beyond = torch.arange(longest * size) >= torch.tensor(contexts).unsqueeze(1)
    return DecodeGroup(
        tokens=torch.tensor([first for _, first in placed]),
        read_rows=cache.read_rows(torch.tensor(tables)),
        mask=_additive(beyond, cache)[:, None, None, :] if min(contexts) < longest * size else None,
    )


def _prefill_chunk(item: Scheduled, first: int, cache: KVCache) -> PrefillChunk:
    last = first + item.num_tokens
    if item.start == 0:
        return PrefillChunk(first, last, item.end, read_rows=None, mask=None)
    num_blocks = -(-item.end // cache.geometry.block_size)
    table = torch.tensor([item.request.block_table[:num_blocks]])
    later = torch.arange(item.end) > torch.arange(item.start, item.end).unsqueeze(1)
    return PrefillChunk(first, last, item.end, cache.read_rows(table), _additive(later, cache))


def _additive(hidden: Tensor, cache: KVCache) -> Tensor:
    """0 where seen and -inf where hidden, in the cache's dtype (a bool mask would be converted in every layer)."""
    return torch.zeros(hidden.shape, dtype=cache.tensor.dtype).masked_fill_(hidden, float("-inf"))
