"""Rules of the model's LoRA adapters beside the engine."""

from collections.abc import Iterator
from typing import Any

from pdcluster_schema.engine_rules import value_or_default
from pdcluster_schema.qos_rules import each_role
from pdcluster_schema.section import Rule
from pdcluster_schema.stock_engine import SGLANG

_SIZES = ("tensorParallelSize", "pipelineParallelSize", "dataParallelSize")
_TYPE = "self.?engine.?type.orValue('pdcluster')"


def adapter_rules() -> Iterator[Rule]:
    yield Rule(
        cel=f"size(self.model.?adapters.orValue([])) == 0 || {_TYPE} != '{SGLANG}'",
        holds=lambda spec: not spec.model.adapters or spec.engine.type != SGLANG,
        reason="are not for engine.type: sglang",
        fix="set another engine.type, or leave them out",
        at="model.adapters",
    )
    yield Rule(
        cel=f"!has(self.model.runtimeAdapters) || {_TYPE} == 'pdcluster'",
        holds=lambda spec: spec.model.runtime_adapters is None or not spec.engine.is_stock,
        reason="is for our own engine, engine.type: pdcluster",
        fix="leave it out, or set engine.type: pdcluster",
        at="model.runtimeAdapters",
    )
    single = " && ".join(f"{value_or_default(size, 'self.roles.ROLE')} == 1" for size in _SIZES)
    yield Rule(
        cel="!has(self.model.runtimeAdapters) || ("
        + each_role(f"(!has(self.roles.ROLE) || {single})")
        + ")",
        holds=lambda spec: spec.model.runtime_adapters is None or _are_single(spec),
        reason="is for workers of one engine of one rank",
        fix=f"leave it out, or set {', '.join(_SIZES[:2])} and {_SIZES[2]} to 1",
        at="model.runtimeAdapters",
    )


def _are_single(spec: Any) -> bool:
    engines = [spec.engine_of(role) for role in spec.roles.computing()]
    return all(
        each.tensor_parallel_size * each.pipeline_parallel_size * each.data_parallel_size == 1
        for each in engines
    )
