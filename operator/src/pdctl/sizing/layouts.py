"""Ranks of one worker that a model can be divided over."""

from collections.abc import Iterator

from pdctl.sizing.profile import RankLayout
from pdctl.sizing.shape import TransformerShape

_SIZES = (1, 2, 4, 8)


def layouts_of(shape: TransformerShape, most: int, *, with_data: bool = True) -> list[RankLayout]:
    """most: ranks of one worker; with_data: its engine has data-parallel ranks.

    Data-parallel ranks pay where they share experts, which lie over all of them in tensor or in
    expert parallel; without experts they are workers.
    """
    tensor = [size for size in _SIZES if size <= most and shape.takes_tensor_ranks(size)]
    found = [RankLayout(size) for size in tensor]
    if not shape.experts:
        return found
    data = [size for size in _SIZES if size <= most and (with_data or size == 1)]
    of_experts = (
        RankLayout(size, ranks, is_expert_parallel)
        for is_expert_parallel in (False, True)
        for size in tensor
        for ranks in data
        if 1 < size * ranks <= most
    )
    return list(dict.fromkeys([*found, *of_experts]))


def uneven_notes(shape: TransformerShape, most: int) -> Iterator[str]:
    """Sizes that no engine takes, as a note."""
    uneven = [f"TP{n}" for n in _SIZES if n <= most and not shape.takes_tensor_ranks(n)]
    if uneven:
        kv = f", {shape.kv_heads} of KV," if shape.kv_heads else ""
        yield f"Left out: {', '.join(uneven)}: {shape.heads} heads{kv} cannot be divided so."
