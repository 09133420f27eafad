"""A rank's place among the ranks of one engine, and its share of heads and layers.

Pure.  There are `tensor_size * pipeline_size` ranks; those of one stage are
neighbours: rank = stage * tensor_size + part.  Rank 0 is the engine process.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.ops.operations import AttentionShape

TENSOR_FIELD, PIPELINE_FIELD = "engine.tensorParallelSize", "engine.pipelineParallelSize"


@dataclass(frozen=True, slots=True)
class ParallelRank:
    """One rank of `tensor_size * pipeline_size`."""

    tensor_size: int = 1
    pipeline_size: int = 1
    rank: int = 0

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole engine."""
        return self.tensor_size * self.pipeline_size

    @property
    def stage(self) -> int:
        """Its pipeline stage, from 0."""
        return self.rank // self.tensor_size

    @property
    def part(self) -> int:
        """Its place within the stage, from 0: which share of each layer it has."""
        return self.rank % self.tensor_size

    @property
    def is_first(self) -> bool:
        """Its stage embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Its stage makes logits."""
        return self.stage == self.pipeline_size - 1

    def share(self, count: int) -> slice:
        """Its share of `count` heads or features, which the tensor-parallel size divides.

        >>> ParallelRank(tensor_size=2, rank=1).share(8)
        slice(4, 8, None)
        """
        size = count // self.tensor_size
        return slice(self.part * size, (self.part + 1) * size)

    def moved_heads(self, num_kv_heads: int) -> range:
        """The KV heads that it sends and receives for its engine: its own.

        With pipeline stages a rank has some layers of its heads alone, and rank 0 moves all.

        >>> ParallelRank(tensor_size=2, rank=1).moved_heads(8)
        range(4, 8)
        >>> ParallelRank(2, 2, rank=0).moved_heads(8)
        range(0, 8)
        """
        if self.pipeline_size > 1:
            return range(num_kv_heads if self.rank == 0 else 0)
        share = self.share(num_kv_heads)
        return range(share.start, share.stop)

    def layers(self, num_layers: int) -> range:
        """Its stage's layers; earlier stages have one more where they do not divide evenly.

        >>> [ParallelRank(pipeline_size=2, rank=rank).layers(5) for rank in range(2)]
        [range(0, 3), range(3, 5)]
        """
        size, more = divmod(num_layers, self.pipeline_size)
        first = self.stage * size + min(self.stage, more)
        return range(first, first + size + (self.stage < more))

    def others(self) -> Iterator["ParallelRank"]:
        """The places of all ranks but 0."""
        return (
            ParallelRank(self.tensor_size, self.pipeline_size, rank)
            for rank in range(1, self.num_ranks)
        )

    def shape(self, whole: AttentionShape) -> AttentionShape:
        """The heads that it computes of a layer's."""
        heads, kv_heads = (
            count // self.tensor_size for count in (whole.num_heads, whole.num_kv_heads)
        )
        return AttentionShape(heads, kv_heads, whole.head_dim, whole.scaling)


ONE_RANK = ParallelRank()


def check_divides(
    place: ParallelRank, shape: AttentionShape, intermediate_size: int, num_layers: int
) -> None:
    """Raise ModelError, with the numbers and the fix, where the model cannot be divided so."""
    size = place.tensor_size
    counts = {
        "KV heads": shape.num_kv_heads,
        "attention heads": shape.num_heads,
        "intermediate size": intermediate_size,
    }
    uneven = [f"its {name} ({count})" for name, count in counts.items() if count % size]
    if uneven:
        allowed = [
            str(n)
            for n in range(1, shape.num_kv_heads + 1)
            if not any(count % n for count in counts.values())
        ]
        raise ModelError(
            f"{TENSOR_FIELD} of {size} does not divide this model: it must divide "
            f"{', '.join(uneven)}: "
            f"set it to one of {', '.join(allowed)}"
        )
    if place.pipeline_size > num_layers:
        raise ModelError(
            f"{PIPELINE_FIELD} of {place.pipeline_size} is over this model's {num_layers} layers, "
            "and each stage needs one: "
            f"set it to {num_layers} or less"
        )
