"""Rules of stock engines: their front end, what NIXL cannot pair, where KV can be offloaded, what
SGLang does not do behind PDCluster's port; and the precision that their flags say.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

from pdcluster_schema.accelerators import NO_ACCELERATOR, Precision
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.engine_rules import engine_rule, given, pods_per_replica, value_or_default
from pdcluster_schema.kv_transfer import KvTransferSpec
from pdcluster_schema.quantities import number_of
from pdcluster_schema.section import Rule
from pdcluster_schema.sections import COMPUTING
from pdcluster_schema.stock_engine import SGLANG, VLLM
from pdcluster_schema.vllm_flags import Flag, flags_of

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
        yield engine_rule(
            role,
            "pipelineParallelSize",
            f"{value_or_default('pipelineParallelSize')} == 1 || "
            "self.?engine.?type.orValue('pdcluster') == 'pdcluster'",
            lambda engine, _: engine.type != VLLM or engine.pipeline_parallel_size == 1,
            (f"must be 1 with vllm, whose NixlConnector {effect}", "raise tensorParallelSize"),
        )
    for role in COMPUTING:
        yield Rule(
            cel=f"[?self.roles.?{role}].all(role, !role.?engine.?kvTransfer.?backends.hasValue())",
            holds=partial(_has_no_backends, role),
            reason="is of the whole cluster, since both ends of a transfer have one transport",
            fix="set it in spec.engine.kvTransfer",
            at=f"roles.{role}.engine.kvTransfer.backends",
        )
        yield engine_rule(
            role,
            "kvTransfer.offload",
            f"!{given('kvTransfer.?offload.?memory')}.hasValue() || "
            f"self.roles.{role}.pools.all(p, p.gpu != '{NO_ACCELERATOR}')",
            lambda engine, gpus: not _offloaded(engine) or NO_ACCELERATOR not in gpus,
            (
                "is for accelerators, since vLLM offloads from those alone, and gpu of a pool is "
                "cpu",
                "leave it out",
            ),
        )


def _has_no_backends(role: str, spec: Any) -> bool:
    declared = spec.roles.computing().get(role)
    section = None if declared is None else declared.engine.kv_transfer
    return section is None or not section.backends


def stock_fault(spec: Any) -> tuple[str, str, str] | None:
    """(place, reason, fix) of what the API server cannot read: flags, and quantities that two
    sections have.
    """
    if (found := sglang_fault(spec) or _fp4_fault(spec)) is not None:
        return found
    engines = {role: spec.engine_of(role) for role in spec.roles.computing()}
    for role, engine in engines.items():
        declared = spec.roles.present()[role]
        if _has_idle_threads(engine):
            reason = "has num_threads, which vLLM reads with UCX alone, and backends has another"
            return f"roles.{role}.engine.kvTransfer.extraConfig", reason, "leave num_threads out"
        fewest = min(pods_per_replica(engine, pool) for pool in declared.pools)
        offloaded = _offloaded(engine, fewest)
        whose = "" if fewest == 1 else f" in each of {fewest} pods"
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
                    f"must be more than the {offloaded} bytes of engine.kvTransfer.offload"
                    f"{whose}, which {relation}, not {found}"
                )
                return f"roles.{role}.{place}", reason, fix
    if engines.keys() >= _STAGES.keys():
        arguments = (engines[role].args or () for role in _STAGES)
        if (fault := pair_fault(*arguments)) is not None:
            return "roles.decode.engine.args", *fault
    return None


def _has_idle_threads(engine: EngineSpec) -> bool:
    section = engine.kv_transfer or KvTransferSpec()
    return "num_threads" in (section.extra_config or {}) and bool(
        {*(section.backends or ())} - {"UCX"}
    )


def _fp4_fault(spec: Any) -> tuple[str, str, str] | None:
    """vLLM's other values of --quantization have kernels for weights alone (0.32), on any GPU."""
    for role, declared in spec.roles.computing().items():
        for index, pool in enumerate(declared.pools):
            has_units = spec.hardware(pool.gpu).computes_in("fp4")
            if _quantization(spec.engine_of(role)) == _FP4_ALONE and not has_units:
                reason = (
                    f"is {pool.gpu}, without units for FP4, and --quantization {_FP4_ALONE} of "
                    "vLLM computes in it alone"
                )
                fix = "use B200 or another type with fp4Flops, or another --quantization"
                return f"roles.{role}.pools[{index}].gpu", reason, fix
    return None


def _moves_kv(engine: EngineSpec) -> bool:
    """Return whether fields are given that mean something for a transfer alone."""
    section = engine.kv_transfer
    return section is not None and (section.backends, section.extra_config) != (None, None)


def _offloaded(engine: EngineSpec, pods: int = 1) -> int:
    """Bytes of host memory in each pod of a worker."""
    offload = None if engine.kv_transfer is None else engine.kv_transfer.offload
    return 0 if offload is None else offload.of_pod(pods, engine.data_parallel_size)


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

    Our own engine has no other than BF16 (and float32); a stock one has what --quantization says.
    """
    return _PRECISION_OF.get(_quantization(engine), "bf16") if engine.is_stock else "bf16"


def _quantization(engine: EngineSpec) -> str:
    return _last(flags_of(engine.args or ()), "quantization", "")


def weight_only_pools(spec: Any) -> Iterator[tuple[str, str]]:
    """(place, remark) of pools whose accelerators lack units for the precision of their engine."""
    for role, declared in spec.roles.computing().items():
        engine = spec.engine_of(role)
        precision = precision_of(engine)
        for index, pool in enumerate(declared.pools):
            if not spec.hardware(pool.gpu).computes_in(precision):
                units, name = precision.upper(), _quantization(engine)
                yield (
                    f"roles.{role}.pools[{index}].gpu",
                    f"{pool.gpu} has no units for {units}, so --quantization {name} makes its "
                    "weights smaller and its prompts no faster; the ratio counts it so",
                )


_FP4_ALONE: Final = "nvfp4_per_token"

_OWN_STATE: Final = frozenset(
    {
        "ngram",
        "ngram_gpu",
        "suffix",
        "medusa",
        "mlp_speculator",
        "draft_model",
        "custom_class",
        "extract_hidden_states",
    }
)
"""Methods of speculation that move nothing between engines; eagle, mtp and the like do."""

_OF_DRAFT: Final = (
    *("method", "model", "revision", "code_revision", "parallel_drafting", "kv_cache_dtype"),
)
_SHORT: Final = {"spec-method": "method", "spec-model": "model"}
_REFUSED = "vLLM refuses every transfer between the two"
_UNSEEN = "vLLM does not compare it, and would decode from KV of another model"


def pair_fault(prefill: Iterable[str], decode: Iterable[str]) -> tuple[str, str] | None:
    """(reason, fix) of the first flag in which arguments of a pair differ.

    vLLM's NIXL compares them before each transfer (0.32: `compute_nixl_compatibility_hash`).
    """
    ours, theirs = flags_of(decode), flags_of(prefill)
    for name, default, effect in (
        ("kv-cache-dtype", "auto", _REFUSED),
        ("disable-hybrid-kv-cache-manager", "false", _REFUSED),
        ("quantization", "none", _UNSEEN),
    ):
        own, other = (_last(flags, name, default) for flags in (ours, theirs))
        if fault := _difference(name, own, other, effect):
            return fault
    name = "load-format"
    own, other = (_last(flags, name, "auto") for flags in (ours, theirs))
    if "dummy" in (own, other) and (fault := _difference(name, own, other, _UNSEEN)):
        return fault  # all others read the same weights
    name = "attention-backend"
    own, other = (_last(flags, name, "").upper() for flags in (ours, theirs))
    if own and other and (fault := _difference(name, own, other)):  # else vLLM may choose the same
        return fault
    for name in ("hf-overrides", "quantization-config"):
        own, other = (json.dumps(_object(flags, name), sort_keys=True) for flags in (ours, theirs))
        if fault := _difference(name, own, other, _UNSEEN):
            return fault
    return _difference("speculative-config", _draft(ours), _draft(theirs))


def _difference(
    name: str, decode: str, prefill: str, effect: str = _REFUSED
) -> tuple[str, str] | None:
    if decode == prefill:
        return None
    reason = f"--{name} is {decode} for decode and {prefill} for prefill, and {effect}"
    return reason, "give both roles the same, in spec.engine.args"


def _last(flags: list[Flag], name: str, default: str) -> str:
    return next((flag.value for flag in reversed(flags) if flag.name == name), default)


def _draft(flags: list[Flag]) -> str:
    """Settings of the speculation that count, as JSON; `none` where it moves nothing."""
    given = _object(flags, "speculative-config")
    given |= {_SHORT[flag.name]: flag.value for flag in flags if flag.name in _SHORT}
    draft = {key.replace("-", "_"): value for key, value in given.items()}
    method = str(draft.get("method", ""))
    if not draft or method in _OWN_STATE:
        return "none"
    draft["method"] = "mtp" if method.endswith("_mtp") else method
    return json.dumps({key: draft[key] for key in _OF_DRAFT if draft.get(key)})


def _object(flags: list[Flag], name: str) -> dict[str, Any]:
    """A flag in JSON.  Its dotted parts are another one behind it, for vLLM as here."""
    whole: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for flag in flags:
        found, *keys = flag.name.split(".")
        if found != name:
            continue
        if not keys:
            whole = _loaded(flag.value)
            continue
        value: Any = flag.value
        with suppress(ValueError):
            value = json.loads(flag.value)
        for key in reversed(keys):
            value = {key: value}
        _merge(parts, value)
    return parts or whole


def _merge(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key, value in theirs.items():
        if isinstance(value, dict) and isinstance(ours.get(key), dict):
            _merge(ours[key], value)
        else:
            ours[key] = value


def _loaded(text: str) -> dict[str, Any]:
    """Text that is no JSON object, which vLLM refuses, is compared as it stands."""
    with suppress(ValueError):
        if isinstance(loaded := json.loads(text), dict):
            return loaded
    return {"model": text}


_PARSER_FLAG = r"^--reasoning[-_]p(a(r(s(er?)?)?)?)?(=|$)"  # whole, or its beginning


def front_end_rules() -> Iterator[Rule]:
    front_end = "self.model.?frontend.orValue('pdcluster')"
    yield Rule(
        cel=f"{front_end} != 'engine' || self.?engine.?type.orValue('pdcluster') == 'vllm'",
        holds=lambda spec: spec.model.frontend != "engine" or spec.engine.type == "vllm",
        reason="is engine, which is for engine.type: vllm",
        fix="leave it out, or set engine.type: vllm",
        at="model.frontend",
    )
    for path in ("engine", *(f"roles.{role}.engine" for role in COMPUTING)):
        names = f"{path}.args".split(".")
        parts = [".".join(names[: n + 1]) for n in range(len(names)) if names[n] != "roles"]
        none = " || ".join(f"!has(self.{part})" for part in parts)
        yield Rule(
            cel=f"{front_end} == 'engine' || {none} || "
            f"!self.{path}.args.exists(a, a.matches('{_PARSER_FLAG}'))",
            holds=partial(_parses_once, path),
            reason="has --reasoning-parser, which leaves structured answers without their form "
            "until it sees the end of the reasoning, which PDCluster parses itself",
            fix="set model.reasoningParser in its place, or model.frontend: engine with type: vllm",
            at=f"{path}.args",
        )


def _parses_once(path: str, spec: Any) -> bool:
    """Return whether a reasoning parser of the engine stands beside its front end."""
    part = spec
    for name in path.split("."):
        part = None if part is None else getattr(part, name)
    args = () if part is None else part.args or ()
    return spec.model.frontend == "engine" or not any(re.match(_PARSER_FLAG, a) for a in args)


def sglang_rules() -> Iterator[Rule]:
    yield Rule(
        cel=f"self.?engine.?type.orValue('pdcluster') != '{SGLANG}' || has(self.roles.mixed)",
        holds=lambda spec: spec.engine.type != SGLANG or spec.roles.mixed is not None,
        reason="is sglang, which is for mixed workers: its decode side has to be called before a "
        "prefill begins, and here it is called with what the prefill answered",
        fix="give roles.mixed in place of prefill and decode, or set type: vllm",
        at="engine.type",
    )


def sglang_fault(spec: Any) -> tuple[str, str, str] | None:
    """(place, reason, fix) of what would cost the API server too much to check."""
    if spec.engine.type != SGLANG or spec.roles.mixed is None:
        return None
    engine = spec.engine_of("mixed")
    block, tokens = engine.block_size, engine.max_batched_tokens
    has_tokens = "max_batched_tokens" in engine.model_fields_set
    for field, is_wrong, reason, fix in (
        (
            "kvTransfer",
            engine.kv_transfer is not None,
            "is not for sglang, whose workers move no KV",
            "leave it out",
        ),
        (
            "kvCacheMemory",
            "kv_cache_memory" in engine.model_fields_set,
            "is not for sglang, which has no such bound",
            "set numBlocks or deviceMemoryShare",
        ),
        (
            "dataParallelSize",
            engine.data_parallel_size > 1,
            "must be 1 with sglang, which has one engine a worker",
            "give the pool more replicas",
        ),
        (
            "maxBatchedTokens",
            has_tokens and tokens % block > 0,
            f"is {tokens}, which blockSize ({block}) does not divide, and SGLang ends with that",
            f"give a multiple of {block}",
        ),
        (
            "blockSize",
            not has_tokens and block & (block - 1) > 0,
            f"is {block}, which does not divide SGLang's own maxBatchedTokens, a power of two",
            f"give a power of two, or maxBatchedTokens that is a multiple of {block}",
        ),
    ):
        if is_wrong:
            return f"roles.mixed.engine.{field}", reason, fix
    return None
