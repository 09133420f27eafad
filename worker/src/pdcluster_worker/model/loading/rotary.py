"""Rotary embeddings, from config.json as transformers reads it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pdcluster_worker.model.loading.support import UnsupportedArchError

Parameters = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rotary:
    head_dim: int
    kind: str  # `rope_type`
    theta: float
    parameters: Parameters = field(default_factory=dict)

    @staticmethod
    def read(
        config: Mapping[str, Any],
        head_dim: int,
        default_theta: float,
        default: Parameters | None = None,
    ) -> "Rotary":
        """Raises UnsupportedArchError for a kind without fixed frequencies.

        default: parameters where the config has none.
        """
        given: Any = config.get("rope_scaling") or config.get("rope_parameters") or default or {}
        if not isinstance(given, dict) or any(isinstance(each, dict) for each in given.values()):
            raise UnsupportedArchError(f"rope_parameters is {given!r}")
        kind = str(given.get("rope_type", given.get("type", "default")))
        theta = given.get("rope_theta", config.get("rope_theta", default_theta))
        partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if kind not in KINDS or partial not in (None, 1, 1.0):
            raise UnsupportedArchError(
                f"its rotary embedding is {kind}, not one of {', '.join(KINDS)}"
            )
        if kind in ("llama3", "yarn"):
            name = "original_max_position_embeddings"  # beside the others it goes first
            length = config.get(name, given.get(name, config.get("max_position_embeddings")))
            given = {**given, name: length}
        rotary = Rotary(head_dim, kind, theta, given)
        try:
            if not rotary.frequencies()[0].isfinite().all():
                raise ValueError("a frequency is not finite")
        except (KeyError, TypeError, ValueError, ArithmeticError) as e:
            raise UnsupportedArchError(
                f"its rotary embedding cannot be read: {type(e).__name__}: {e}"
            ) from e
        return rotary

    def frequencies(self) -> tuple[Tensor, float]:
        """Inverse frequencies [head_dim / 2] float32, and the factor of cosines and sines."""
        return KINDS[self.kind](self)

    def table(self, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [num_positions, head_dim / 2] float32, rounded to `dtype`."""
        frequencies, scale = self.frequencies()
        angles = torch.arange(num_positions)[:, None].float() * frequencies
        cosine, sine = angles.cos() * scale, angles.sin() * scale
        return cosine.to(dtype).float(), sine.to(dtype).float()


def _powers(rotary: Rotary) -> Tensor:
    exponents = torch.arange(0, rotary.head_dim, 2, dtype=torch.float) / rotary.head_dim
    return rotary.theta**exponents


def _default(rotary: Rotary) -> tuple[Tensor, float]:
    return 1.0 / _powers(rotary), 1.0


def _linear(rotary: Rotary) -> tuple[Tensor, float]:
    return 1.0 / _powers(rotary) / rotary.parameters["factor"], 1.0


def _llama3(rotary: Rotary) -> tuple[Tensor, float]:
    given = rotary.parameters
    low, high, factor = given["low_freq_factor"], given["high_freq_factor"], given["factor"]
    original = given["original_max_position_embeddings"]
    plain = 1.0 / _powers(rotary)
    lengths = 2 * math.pi / plain
    scaled = torch.where(lengths > original / low, plain / factor, plain)
    smooth = (original / lengths - low) / (high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = ~(lengths < original / high) & ~(lengths > original / low)
    return torch.where(is_between, between, scaled), 1.0


def _yarn(rotary: Rotary) -> tuple[Tensor, float]:
    given, dim = rotary.parameters, rotary.head_dim
    factor, original = given["factor"], given["original_max_position_embeddings"]
    powers = _powers(rotary)

    def dimension(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rotary.theta))

    first, last = dimension(given.get("beta_fast") or 32), dimension(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first), 0, 1)
    kept = 1 - ramp
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return frequencies, _yarn_scale(given, factor)


def _yarn_scale(given: Parameters, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    weight, weight_of_all = given.get("mscale"), given.get("mscale_all_dim")
    if weight and weight_of_all:
        return float(scale(weight) / scale(weight_of_all))
    return scale(1)


KINDS: Mapping[str, Callable[[Rotary], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
