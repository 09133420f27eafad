"""Ranks of one worker that a model can be divided over."""

from collections.abc import Iterator

from pdctl.sizing.profile import RankLayout
from pdctl.sizing.shape import TransformerShape

_SIZES = (1, 2, 4, 8)


def layouts_of(shape: TransformerShape, most: int) -> list[RankLayout]:
    """most: ranks of one worker."""
    sizes = [size for size in _SIZES if size <= most]
    whole = [size for size in sizes if shape.takes_tensor_ranks(size)]
    found = [RankLayout(size) for size in whole]
    if shape.experts:
        found += [RankLayout(size, 1, True) for size in whole if size > 1]
        found += [RankLayout(1, size, True) for size in sizes if size > 1]
    return found


def uneven_notes(shape: TransformerShape, most: int) -> Iterator[str]:
    """Sizes that no engine takes, as a note."""
    uneven = [f"TP{n}" for n in _SIZES if n <= most and not shape.takes_tensor_ranks(n)]
    if uneven:
        kv = f", {shape.kv_heads} of KV," if shape.kv_heads else ""
        yield f"Left out: {', '.join(uneven)}: {shape.heads} heads{kv} cannot be divided so."
