"""The layers of a step, one operation after another: the reference for `run_layers`."""

from torch import Tensor

from pdcluster_worker.model.ops.operations import Layers, Operations, Rotation
from pdcluster_worker.model.step_plan import StepPlan


def layer_by_layer(
    ops: Operations, hidden: Tensor, plan: StepPlan, layers: Layers, rotation: Rotation
) -> None:
    x: Tensor | None = None
    for index, layer in enumerate(layers.each):
        qkv = ops.linear(ops.add_rms_norm(x, hidden, layer.attention_norm), layer.qkv)
        ops.rope_store(qkv, plan, index, rotation if layer.rotates else None, layer.head_norms)
        x = ops.group.reduce(ops.linear(ops.attend(qkv, plan, index, layer.window), layer.out))
        gate_up = ops.linear(ops.add_rms_norm(x, hidden, layer.mlp_norm), layer.gate_up)
        x = ops.group.reduce(ops.linear(ops.gate_mul(gate_up, layers.activation), layer.down))
    assert x is not None, "a stage has layers"
    hidden.add_(x)
