"""Rules of stock engines that move KV: what NIXL cannot pair, and where KV can be offloaded; and
the precision that their flags say.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from pdcluster_schema.accelerators import NO_ACCELERATOR, Precision
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.engine_rules import given, value_or_default
from pdcluster_schema.quantities import number_of
from pdcluster_schema.section import Rule
from pdcluster_schema.sections import COMPUTING
from pdcluster_schema.vllm_engine import VLLM
from pdcluster_schema.vllm_flags import flags_of
from pdcluster_schema.vllm_pair import pair_fault

_STAGES = {
    "prefill": "fails every transfer from a worker of several stages",
    "decode": "frees a prompt's blocks once the first of several stages has read them",
}


def stock_rules() -> Iterator[Rule]:
    """Rules of `kvTransfer` and of the stages of a pair."""
    yield Rule(
        cel="!has(self.roles.mixed) || [self.roles.mixed].all(role, "
        f"!{given('kvTransfer.?backends')}.hasValue() && "
        f"!{given('kvTransfer.?extraConfig')}.hasValue())",
        holds=lambda spec: spec.roles.mixed is None or not _moves_kv(spec.engine_of("mixed")),
        reason="means nothing beside mixed workers but for offload, since they move no KV",
        fix="leave backends and extraConfig out",
        at="engine.kvTransfer",
    )
    for role, effect in _STAGES.items():
        yield _rule(
            role,
            "engine.pipelineParallelSize",
            f"{value_or_default('pipelineParallelSize')} == 1 || "
            "self.?engine.?type.orValue('pdcluster') == 'pdcluster'",
            lambda engine, _: engine.pipeline_parallel_size == 1,
            (f"must be 1 with vllm, whose NixlConnector {effect}", "raise tensorParallelSize"),
        )
    for role in COMPUTING:
        yield _rule(
            role,
            "engine.kvTransfer.backends",
            "!role.?engine.?kvTransfer.?backends.hasValue()",
            lambda _, role: not (role.engine.kv_transfer and role.engine.kv_transfer.backends),
            (
                "is of the whole cluster, since both ends of a transfer have one transport",
                "set it in spec.engine.kvTransfer",
            ),
        )
        yield _rule(
            role,
            "engine.kvTransfer.offload",
            f"!{given('kvTransfer.?offload.?memory')}.hasValue() || "
            f"self.roles.{role}.pools.all(p, p.gpu != '{NO_ACCELERATOR}')",
            lambda engine, role: (
                not _offloaded(engine) or all(pool.gpu != NO_ACCELERATOR for pool in role.pools)
            ),
            (
                "is for accelerators, since vLLM offloads from those alone, and gpu of a pool is "
                "cpu",
                "leave it out",
            ),
        )


def stock_fault(spec: Any) -> tuple[str, str, str] | None:
    """(place, reason, fix) of what the API server cannot read: flags, and quantities that two
    sections have.
    """
    engines = {role: spec.engine_of(role) for role in spec.roles.computing()}
    for role, engine in engines.items():
        declared, offloaded = spec.roles.present()[role], _offloaded(engine)
        limit, memory = declared.resources.limits.get("memory"), declared.shared_memory
        for place, found, relation, fix in (
            (
                "resources.limits.memory",
                limit,
                "count to it",
                "raise the limit, or lower offload.memory",
            ),
            ("sharedMemory", memory, "are in it", "raise it, or leave it out"),
        ):
            if found is not None and number_of(found) <= offloaded:
                reason = (
                    f"must be more than the {offloaded} bytes of engine.kvTransfer.offload, which "
                    f"{relation}, not {found}"
                )
                return f"roles.{role}.{place}", reason, fix
    if engines.keys() >= _STAGES.keys():
        arguments = (engines[role].args or () for role in _STAGES)
        if (fault := pair_fault(*arguments)) is not None:
            return "roles.decode.engine.args", *fault
    return None


def _rule(
    role: str,
    at: str,
    cel: str,
    holds: Callable[[EngineSpec, Any], bool],
    text: tuple[str, str],
) -> Rule:
    """A rule of a role with a stock engine.  cel: of `role`.  holds: of its engine and itself."""

    def holds_in(spec: Any) -> bool:
        declared = spec.roles.computing().get(role)
        return declared is None or spec.engine.type != VLLM or holds(spec.engine_of(role), declared)

    return Rule(
        cel=f"[?self.roles.?{role}].all(role, {cel})",
        holds=holds_in,
        reason=text[0],
        fix=text[1],
        at=f"roles.{role}.{at}",
    )


def _moves_kv(engine: EngineSpec) -> bool:
    """Return whether fields are given that mean something for a transfer alone."""
    section = engine.kv_transfer
    return section is not None and (section.backends, section.extra_config) != (None, None)


def _offloaded(engine: EngineSpec) -> int:
    """Bytes of host memory."""
    offload = None if engine.kv_transfer is None else engine.kv_transfer.offload
    return 0 if offload is None else offload.memory


_PRECISION_OF: Final[dict[str, Precision]] = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "ptpc_fp8": "fp8",
    "fp8_per_tensor": "fp8",
    "fp8_per_block": "fp8",
    "fp8_per_channel": "fp8",
    "mxfp8": "fp8",
    "deepseek_v4_fp8": "fp8",
    "modelopt": "fp8",
    "modelopt_mxfp8": "fp8",
    "modelopt_fp4": "fp4",
    "nvfp4_per_token": "fp4",
}
"""Values of vLLM's --quantization with which it computes in another precision than BF16; the others
quantize weights alone, or leave it to the checkpoint.
"""


def precision_of(engine: EngineSpec) -> Precision:
    """Precision in which an engine computes prompts, as far as its fields say it.

    Our own engine has no other than BF16 (and float32); vLLM has what --quantization says.
    """
    if engine.type != VLLM:
        return "bf16"
    given = [flag.value for flag in flags_of(engine.args or ()) if flag.name == "quantization"]
    return _PRECISION_OF.get(given[-1] if given else "", "bf16")
