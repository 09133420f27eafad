"""Rule of `engine.quantization` of a pair."""

from typing import Any

from pdcluster_schema.engine_rules import value_or_default
from pdcluster_schema.section import Rule


def precision_rule() -> Rule:
    """KV of a remote prefill is that of the prefill worker's weights."""
    field, prefill, decode = "quantization", "roles.prefill", "roles.decode"
    one, other = value_or_default(field, prefill), value_or_default(field, decode)
    allowed = " && ".join(
        f"{value_or_default('allowMixedPrecision', role)} && "
        f"!{value_or_default('batchInvariant', role)}"
        for role in (prefill, decode)
    )

    def holds(spec: Any) -> bool:
        engines = [spec.engine_of(role) for role in spec.roles.computing()]
        return engines[0].quantization == engines[-1].quantization or all(
            engine.allow_mixed_precision and not engine.batch_invariant for engine in engines
        )

    return Rule(
        cel=f"[self.roles].all(roles, !has({prefill}) || !has({decode}) || "
        f"!has({prefill}.engine) && !has({decode}.engine) || "
        f"['int8', 'fp8_e4m3'].all(v, ({one} == v) == ({other} == v)) || {allowed})",
        holds=holds,
        reason="must be that of prefill, since decode goes on from KV that its weights compute",
        fix="correct quantization of one of them, or set engine.allowMixedPrecision: true, without "
        "batchInvariant",
        at=f"{decode}.engine.{field}",
        found=lambda spec: "{1} for decode and {0} for prefill".format(
            *(spec.engine_of(role).quantization for role in spec.roles.computing())
        ),
    )
