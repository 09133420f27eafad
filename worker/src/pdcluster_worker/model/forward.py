"""The seam between the runner and a model's code: our own decoder, or transformers' module over the
same operations.
"""

from typing import Protocol

from torch import Tensor

from pdcluster_worker.model.ops.operations import Operations
from pdcluster_worker.model.step_plan import StepPlan


class Forward(Protocol):
    """One model over one KV cache."""

    code: str
    """Code that computes the layers, for the log and /version: "decoder" or "transformers"."""

    operations: Operations
    """Operations that it computes by."""

    def logits(self, plan: StepPlan) -> Tensor:
        """Compute one step and store its keys and values.

        Returns [R, vocab_size] float32, a row for each of `plan.sample_at`.
        """
        ...

    def warm_up(self, num_rows: int) -> None:
        """Have the code of products of so many rows made."""
        ...

    def close(self) -> None:
        """End what it started beside this process."""
        ...
