"""Our attention function for transformers' own model code.

`register` makes transformers call `paged_attention` in every layer; it hands
the call to the object that the forward pass was given as `attend`: a
`generic.PlannedAttention` when serving, a `probe.Probe` when a model is loaded.
"""

from typing import Any, Protocol

from torch import Tensor

from pdcluster_worker.errors import ModelError

ATTENTION_NAME = "pdcluster_paged"


class Attend(Protocol):
    """The attention of one forward pass."""

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """One layer.  query: [1, Hq, T, D]; key, value: [1, Hkv, T, D], rotated; returns [1, T, Hq,
        D].
        """
        ...


def register() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers.

    There is deliberately no mask function of that name: transformers then
    builds no mask at all (masking_utils, 'other custom attention').
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
    """transformers' attention interface; `attend` is among the keyword arguments that the model
    hands on from its own call.
    """
    attend: Attend | None = options.pop("attend", None)
    if attend is None:
        raise ModelError(
            "the model's code does not hand keyword arguments on to its attention, which is how "
            "ours is reached"
        )
    return attend(module, query, key, value, attention_mask=attention_mask, **options), None
