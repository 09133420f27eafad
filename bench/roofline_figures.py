"""Least work of one engine step: bytes moved and operations, from a model's config; pure
arithmetic.

Counted are the products with the weights, attention over the KV blocks, and
reading the weights, the keys and the values once.  Small operators, activations
and the embedding's rows are not: they are a per cent or less.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a llama-like decoder."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """From config.json.  Raises ValueError for a model that is not of this form."""
        try:
            num_heads = int(config["num_attention_heads"])
            return cls(
                num_layers=int(config["num_hidden_layers"]),
                hidden=int(config["hidden_size"]),
                num_heads=num_heads,
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
                intermediate=int(config["intermediate_size"]),
                vocab=int(config["vocab_size"]),
            )
        except KeyError as e:
            raise ValueError(
                f"config.json: has no {e.args[0]}; only llama-like decoders are counted"
            ) from e

    @property
    def layer_weights(self) -> int:
        """Elements of all layers' matrices: q, k, v, output, and three of a gated MLP."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Elements of the output head, tied or not: it is read either way."""
        return self.hidden * self.vocab

    @property
    def kv_elements(self) -> int:
        """Elements of one token's KV, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step.

    num_tokens:  rows through the layers
    num_sampled: rows through the head
    attended:    sum over rows of the tokens that each attends to
    kv_read:     tokens whose keys and values are read: a chunk reads its context once
    """

    num_tokens: int
    num_sampled: int
    attended: float
    kv_read: float

    @classmethod
    def decode(cls, num_sequences: int, context: float) -> "Step":
        """A token of each sequence, at a mean context."""
        read = num_sequences * context
        return cls(num_sequences, num_sequences, read, read)

    @classmethod
    def chunk(cls, num_tokens: int, before: float, num_sampled: int = 0) -> "Step":
        """So many tokens of one prompt after `before` others; each attends to all up to itself."""
        attended = num_tokens * (before + (num_tokens + 1) / 2)
        return cls(num_tokens, num_sampled, attended, before + num_tokens)

    def bytes_moved(self, shape: Shape, width: int) -> float:
        """At least; width: bytes of an element, of weights and KV."""
        weights = shape.layer_weights + (shape.head_weights if self.num_sampled else 0)
        return width * (weights + self.kv_read * shape.kv_elements)

    def flops(self, shape: Shape) -> float:
        """Two for a multiplication and its addition."""
        products = self.num_tokens * shape.layer_weights + self.num_sampled * shape.head_weights
        attention = 2 * self.attended * shape.num_layers * shape.num_heads * shape.head_dim
        return 2 * (products + attention)


@dataclass(frozen=True, slots=True)
class Machine:
    """Measurements of a machine.  Bytes and operations a second"""

    bandwidth: float
    peak: float


@dataclass(frozen=True, slots=True)
class Reached:
    """A step beside the machine's limits."""

    seconds: float
    bytes_moved: float
    flops: float
    machine: Machine

    @property
    def floor_seconds(self) -> float:
        """No step of these bytes and operations takes less."""
        return max(self.bytes_moved / self.machine.bandwidth, self.flops / self.machine.peak)

    @property
    def bound(self) -> str:
        """Limit that sets the floor."""
        is_memory = self.bytes_moved / self.machine.bandwidth >= self.flops / self.machine.peak
        return "memory" if is_memory else "compute"

    @property
    def bandwidth_ratio(self) -> float:
        """Share of the measured bandwidth."""
        return self.bytes_moved / self.seconds / self.machine.bandwidth

    @property
    def peak_ratio(self) -> float:
        """Share of the measured matmul peak."""
        return self.flops / self.seconds / self.machine.peak

    @property
    def floor_ratio(self) -> float:
        """Share of the roofline: 1 = as fast as the machine allows."""
        return self.floor_seconds / self.seconds


def reached(step: Step, shape: Shape, width: int, seconds: float, machine: Machine) -> Reached:
    """A measured step beside the limits."""
    return Reached(seconds, step.bytes_moved(shape, width), step.flops(shape), machine)
