"""Our attention function for transformers' own model code."""

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
    """There is no mask function of that name on purpose: transformers then builds no mask."""
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
