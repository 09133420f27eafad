"""Model types that our decoder runs.  No torch: a start reads this before torch is imported."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    offset_norms: bool = False  # norms store their weight less 1 and round once (gemma)
    head_norms: bool = False  # each query and key head is normed (qwen3)
    may_not_rotate: bool = False  # some layers have no positions (smollm3)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_norms=True),
    "smollm3": Family(may_not_rotate=True),
    "gemma": Family(offset_norms=True),
}
