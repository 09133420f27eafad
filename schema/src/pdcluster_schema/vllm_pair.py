"""Flags that both engines of a pair need alike: vLLM's NIXL compares them before each transfer.

vLLM 0.32: `compute_nixl_compatibility_hash` of its NIXL connector.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from pdcluster_schema.vllm_flags import Flag, flags_of

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


def pair_fault(prefill: Iterable[str], decode: Iterable[str]) -> tuple[str, str] | None:
    """(reason, fix) of the first flag in which arguments of a pair differ."""
    ours, theirs = flags_of(decode), flags_of(prefill)
    for name, default in (("kv-cache-dtype", "auto"), ("disable-hybrid-kv-cache-manager", "false")):
        if fault := _fault(name, _last(ours, name, default), _last(theirs, name, default)):
            return fault
    name = "attention-backend"
    own, other = (_last(flags, name, "").upper() for flags in (ours, theirs))
    if own and other and (fault := _fault(name, own, other)):  # else vLLM may choose the same
        return fault
    return _fault("speculative-config", _draft(ours), _draft(theirs))


def _fault(name: str, decode: str, prefill: str) -> tuple[str, str] | None:
    if decode == prefill:
        return None
    reason = (
        f"--{name} is {decode} for decode and {prefill} for prefill, and vLLM refuses every "
        "transfer between the two"
    )
    return reason, "give both roles the same, in spec.engine.args"


def _last(flags: list[Flag], name: str, default: str) -> str:
    return next((flag.value for flag in reversed(flags) if flag.name == name), default)


def _draft(flags: list[Flag]) -> str:
    """Settings of the speculation that count, as JSON; `none` where it moves nothing."""
    given: dict[str, Any] = {}
    for flag in flags:
        name, _, key = flag.name.partition(".")
        if name == "speculative-config":
            given |= {key: flag.value} if key else _loaded(flag.value)
        elif name in _SHORT:
            given[_SHORT[name]] = flag.value
    draft = {key.replace("-", "_"): value for key, value in given.items()}
    method = str(draft.get("method", ""))
    if not draft or method in _OWN_STATE:
        return "none"
    draft["method"] = "mtp" if method.endswith("_mtp") else method
    return json.dumps({key: draft[key] for key in _OF_DRAFT if draft.get(key)})


def _loaded(text: str) -> dict[str, Any]:
    """Text that is no JSON object, which vLLM refuses, is compared as it stands."""
    with suppress(ValueError):
        if isinstance(loaded := json.loads(text), dict):
            return loaded
    return {"model": text}
