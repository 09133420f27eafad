"""The model types that our decoder runs, each a handful of traits.

Has no torch: a start looks here before that is imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Traits of a model type.

    offset_norms:   norms store their weight less 1 and round once (gemma).
    head_norms:     each query and key head is normed (qwen3).
    may_not_rotate: some layers have no positions (smollm3).
    """

    offset_norms: bool = False
    head_norms: bool = False
    may_not_rotate: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_norms=True),
    "smollm3": Family(may_not_rotate=True),
    "gemma": Family(offset_norms=True),
}
