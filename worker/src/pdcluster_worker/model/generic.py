"""transformers' own module, with our attention and linear layers, for other types of models."""

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.decoder import Forward
from pdcluster_worker.model.loading.transformers_loader import probe
from pdcluster_worker.model.ops.operations import Operations
from pdcluster_worker.model.step_plan import StepPlan

logger = logging.getLogger(__name__)


class Generic(Forward):
    code = "transformers"

    def __init__(self, module: Any, operations: Operations) -> None:
        self.operations = operations
        self._module = module

    def logits(self, plan: StepPlan) -> Tensor:
        # logits_to_keep leaves scaling and capping of logits to the model's own code.
        out = self._module(
            input_ids=plan.token_ids.unsqueeze(0),
            position_ids=plan.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=plan.sample_at,
            attend=functools.partial(self._attend, plan),
        )
        logits: Tensor = out.logits[0].float()
        return logits

    def _attend(
        self,
        plan: StepPlan,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sliding_window: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Store the step's keys and values, then attend over the cache.

        Other options were checked by `probe` at load.
        """
        qkv = torch.cat((query[0], key[0], value[0])).transpose(0, 1).flatten(1).contiguous()
        self.operations.rope_store(qkv, plan, module.layer_idx, None, None)
        out = self.operations.attend(qkv, plan, module.layer_idx, sliding_window)
        return out.view(1, len(out), query.shape[1], query.shape[3])


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear, operations: Operations, *, wide: bool) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self._packed = operations.pack(linear.weight.detach(), bias, wide=wide)
        self._operations = operations
        self._width = linear.out_features
        self._dtype = linear.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        """Raises TypeError for another dtype than the weights', as nn.Linear does."""
        if x.dtype != self._dtype:
            raise TypeError(f"a product of {self._dtype} weights with {x.dtype} rows")
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._operations.linear(rows, self._packed).view(*x.shape[:-1], self._width)


def pack_linears(module: Any, operations: Operations, num_layers: int, max_model_len: int) -> None:
    """Replace linear layers by packed ones, unless the module's code then fails.

    Logits of the head are float32.
    """
    head = module.get_output_embeddings()
    replaced = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in replaced:
        setattr(parent, name, PackedLinear(child, operations, wide=child is head))
    try:
        probe(module, num_layers, max_model_len)
    except ModelError as e:
        logger.warning("the model's products stay as they are, which is slower: %s", e)
        for parent, name, child in replaced:
            setattr(parent, name, child)
