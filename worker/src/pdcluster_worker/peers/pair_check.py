"""Pair check of the handshake: may KV blocks move between two workers (docs/kv-blocks.md)?"""

import logging

import msgspec

from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.peers import Hello
from pdcluster_worker.metrics import Metrics

logger = logging.getLogger(__name__)

_REMEMBERED = 1024
"""Engine ids; far above the workers of a cell, so that only restarted ones are ever forgotten."""


def mismatch(mine: Hello, theirs: Hello) -> tuple[str, str] | None:
    """The first difference: the label of pdcluster_peer_refused_total, and the reason with both
    values and the fix; None = they match.
    """
    moves_kv = mine.has_engine and theirs.has_engine
    if moves_kv and mine.geometry != theirs.geometry:
        return "kv_geometry", _geometry_reason(mine.geometry, theirs.geometry)
    if moves_kv and mine.weights != theirs.weights:
        return "weights", (
            f"weights fingerprint is {mine.weights} here and {theirs.weights} at the peer; load "
            "the same model files and adapters on both workers"
        )
    if moves_kv and not _fits(mine, theirs):
        return "precision", (
            f"weights are held in {mine.precision} here and in {theirs.precision} at the peer: set "
            "the same engine.quantization for both, or engine.allowMixedPrecision: true for both, "
            "without engine.batchInvariant, where decode may go on from KV of other weights"
        )
    if mine.revision != theirs.revision:
        return "revision", (
            f"revision is {mine.revision} here and {theirs.revision} at the peer; only workers of "
            "one revision pair"
        )
    if not moves_kv:
        if not mine.model or not theirs.model or mine.model == theirs.model:
            return None
        return "model", (
            f"model is {mine.model} here and {theirs.model} at the peer: give both workers the "
            "same model.name"
        )
    low, high = sorted((mine.tensor_parallel_size, theirs.tensor_parallel_size))
    if high % low:
        sizes = f"{mine.tensor_parallel_size} here and {theirs.tensor_parallel_size} at the peer"
        return "tensor_parallel", (
            f"tensor-parallel size is {sizes}: one must divide the other; set "
            "engine.tensorParallelSize of prefill or decode so"
        )
    if mine.operations != theirs.operations:
        return "operations", (
            f"operations are {mine.operations or 'not batch-invariant'} here and "
            f"{theirs.operations or 'not batch-invariant'} at the peer, which give other bits; "
            "under engine.batchInvariant run both on CPUs of one kind, set PDCLUSTER_KERNELS to a "
            "level that both have, or leave engine.batchInvariant out"
        )
    return None


def _fits(mine: Hello, theirs: Hello) -> bool:
    """Return whether the weights have one precision, or both sides take KV of another one."""
    return mine.precision == theirs.precision or (
        mine.mixes_precisions and theirs.mixes_precisions and not mine.operations
    )


def _geometry_reason(mine: KVGeometry, theirs: KVGeometry) -> str:
    ours, others = msgspec.structs.asdict(mine), msgspec.structs.asdict(theirs)
    differences = ", ".join(
        f"{name} is {ours[name] or 'not given'} here and {others[name] or 'not given'} at the peer"
        for name in ours
        if ours[name] != others[name]
    )
    fix = "give both workers the same model and the same engine sizes"
    if mine.kind != theirs.kind and mine.kind.startswith("vllm-"):
        fix = "give the engines of both workers one version of vLLM, to the last digit"
    elif mine.computed_dtype or theirs.computed_dtype:
        fix = f"set the same engine.kvCacheDtype and model.dtype for both, and {fix}"
    elif mine.dtype != theirs.dtype:
        fix = f"set model.dtype to bfloat16 or float32, and {fix}"
    return f"KV geometry differs: {differences}; {fix}"


class Refusals:
    """Pairs that the handshake refused, from either side: logged and counted once, remembered.

    One per worker, shared by its gRPC service and its clients.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._reasons: dict[str, str] = {}

    def check(self, mine: Hello, theirs: Hello) -> str | None:
        """Returns the reason of a refusal, or None."""
        if theirs.engine_id in self._reasons:
            return self._reasons[theirs.engine_id]
        found = mismatch(mine, theirs)
        if found is None:
            return None
        label, reason = found
        self._reasons[theirs.engine_id] = reason
        if len(self._reasons) > _REMEMBERED:
            del self._reasons[next(iter(self._reasons))]
        self._metrics.peer_refused.labels(label).inc()
        logger.warning(
            "refused peer engine=%s role=%s reason=%s", theirs.engine_id, theirs.role, reason
        )
        return reason

    def reason(self, engine_id: str) -> str | None:
        return self._reasons.get(engine_id)
