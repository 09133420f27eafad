"""A rank's share of heads and layers: rank = stage * tensor_size + part."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.ops.operations import AttentionShape

TENSOR_FIELD, PIPELINE_FIELD = "engine.tensorParallelSize", "engine.pipelineParallelSize"


@dataclass(frozen=True, slots=True)
class ParallelRank:
    tensor_size: int = 1
    pipeline_size: int = 1
    rank: int = 0

    @property
    def num_ranks(self) -> int:
        return self.tensor_size * self.pipeline_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_size

    @property
    def part(self) -> int:
        return self.rank % self.tensor_size

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pipeline_size - 1

    def share(self, count: int) -> slice:
        """Its share of `count` heads or features, which tensor_size divides.

        >>> ParallelRank(tensor_size=2, rank=1).share(8)
        slice(4, 8, None)
        """
        size = count // self.tensor_size
        return slice(self.part * size, (self.part + 1) * size)

    def moved_heads(self, num_kv_heads: int) -> range:
        """KV heads that this rank transfers; with pipeline stages rank 0 transfers all.

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
        """Its stage's layers; earlier stages have one more if they do not divide evenly.

        >>> [ParallelRank(pipeline_size=2, rank=rank).layers(5) for rank in range(2)]
        [range(0, 3), range(3, 5)]
        """
        size, more = divmod(num_layers, self.pipeline_size)
        first = self.stage * size + min(self.stage, more)
        return range(first, first + size + (self.stage < more))

    def others(self) -> Iterator["ParallelRank"]:
        """All ranks but 0."""
        return (
            ParallelRank(self.tensor_size, self.pipeline_size, rank)
            for rank in range(1, self.num_ranks)
        )

    def shape(self, whole: AttentionShape) -> AttentionShape:
        heads, kv_heads = (
            count // self.tensor_size for count in (whole.num_heads, whole.num_kv_heads)
        )
        return AttentionShape(heads, kv_heads, whole.head_dim, whole.scaling)


ONE_RANK = ParallelRank()


def check_divides(
    place: ParallelRank, shape: AttentionShape, divided: Mapping[str, int], num_layers: int
) -> None:
    """Raise ModelError where the ranks do not divide the model.  divided: counts beside heads."""
    size = place.tensor_size
    counts = {
        "KV heads": shape.num_kv_heads,
        "attention heads": shape.num_heads,
        **divided,
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
