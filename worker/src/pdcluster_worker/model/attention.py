"""Our attention function for transformers' own model code.

transformers calls `paged_attention` in every layer, which calls the `attend` of the forward pass:
`generic.PlannedAttention` when serving, a `probe.Probe` when a model is loaded.
"""

from typing import Any, Protocol

from torch import Tensor

from pdcluster_worker.errors import ModelError

ATTENTION_NAME = "pdcluster_paged"


class Attend(Protocol):
    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """query: [1, Hq, T, D]; key, value: [1, Hkv, T, D], rotated; returns [1, T, Hq, D]."""
        ...


def register() -> None:
    """Register our attention with transformers.

    There is no mask function of that name on purpose: transformers then builds no mask at all
    (masking_utils, 'other custom attention').
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; the model passes `attend` on as a keyword argument."""
    attend: Attend | None = options.pop("attend", None)
    if attend is None:
        raise ModelError(
            "the model's code does not hand keyword arguments on to its attention, which is how "
            "ours is reached"
        )
    return attend(module, query, key, value, attention_mask=attention_mask, **options), None
