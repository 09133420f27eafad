"""Interface between the runner and a model: our decoder, or transformers' module."""

from typing import Protocol

from torch import Tensor

from pdcluster_worker.model.ops.operations import Operations
from pdcluster_worker.model.step_plan import StepPlan


class Forward(Protocol):
    """A model over its KV cache."""

    code: str  # "decoder" or "transformers"

    operations: Operations

    def logits(self, plan: StepPlan) -> Tensor:
        """[R, vocab_size] float32, a row for each of `plan.sample_at`; also writes the KV cache."""
        ...

    def warm_up(self, num_rows: int) -> None:
        """Compile the products for that many rows."""
        ...

    def close(self) -> None:
        """End other processes that it started."""
        ...
