"""Experts of a layer: a router chooses some of them for each row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Experts:
    """Products, in the implementation's own layout: `router` of all experts, wide, the others of
    those of this rank, from `first` on.
    """

    router: Any
    gate_up: Sequence[Any]
    down: Sequence[Any]
    chosen: int  # for each row
    normalizes: bool  # weights of the chosen ones add up to 1
    first: int = 0


def choose(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Numbers and weights [T, chosen] of the greatest logits [T, E]; of equal ones the first."""
    ordered = logits.float().sort(dim=1, descending=True, stable=True)
    greatest, numbers = ordered.values[:, : experts.chosen], ordered.indices[:, : experts.chosen]
    if experts.normalizes:
        return numbers, greatest.softmax(1)
    return numbers, torch.softmax(logits.float(), 1).gather(1, numbers)
