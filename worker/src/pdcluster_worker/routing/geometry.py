"""Pair check of the handshake: may KV blocks move between two workers (docs/kv-blocks.md)?"""

import msgspec

from pdcluster_worker.messages.facts import KVGeometry, PeerFacts


def mismatch(mine: PeerFacts, theirs: PeerFacts) -> str | None:
    """Reason for a refusal, with both values of each field and the fix; None = they match."""
    label = reason_label(mine, theirs)
    if label is None:
        return None
    if label == "kv_geometry":
        differences = ", ".join(_geometry_differences(mine.geometry, theirs.geometry))
        return (
            f"KV geometry differs: {differences}; {_geometry_fix(mine.geometry, theirs.geometry)}"
        )
    if label == "weights":
        return (
            f"weights fingerprint is {mine.weights} here and {theirs.weights} at the peer; load "
            "the same model files on both workers"
        )
    if label == "tensor_parallel":
        sizes = f"{mine.tensor_parallel_size} here and {theirs.tensor_parallel_size} at the peer"
        return (
            f"tensor-parallel size is {sizes}: one must divide the other; set "
            "engine.tensorParallelSize of prefill or decode so"
        )
    if label == "model":
        return (
            f"model is {mine.model} here and {theirs.model} at the peer: give both workers the "
            "same model.name"
        )
    if label == "revision":
        return (
            f"revision is {mine.revision} here and {theirs.revision} at the peer; only workers of "
            "one revision pair"
        )
    return (
        f"operations are {mine.operations or 'not batch-invariant'} here and "
        f"{theirs.operations or 'not batch-invariant'} at the peer, "
        "which give other bits; under engine.batchInvariant run both on CPUs of one kind, set "
        "PDCLUSTER_KERNELS to a level that both "
        "have, or leave engine.batchInvariant out"
    )


def reason_label(mine: PeerFacts, theirs: PeerFacts) -> str | None:
    """The first difference, as the label of pdcluster_peer_refused_total; None = they match."""
    moves_kv = mine.has_engine and theirs.has_engine
    if moves_kv and mine.geometry != theirs.geometry:
        return "kv_geometry"
    if moves_kv and mine.weights != theirs.weights:
        return "weights"
    if mine.revision != theirs.revision:
        return "revision"
    if not moves_kv:
        return "model" if mine.model and theirs.model and mine.model != theirs.model else None
    low, high = sorted((mine.tensor_parallel_size, theirs.tensor_parallel_size))
    if high % low:
        return "tensor_parallel"
    return "operations" if mine.operations != theirs.operations else None


def _geometry_fix(mine: KVGeometry, theirs: KVGeometry) -> str:
    if mine.dtype != theirs.dtype:
        return (
            "set model.dtype to bfloat16 or float32, and give both workers the same model and "
            "engine sizes"
        )
    return "give both workers the same model and the same engine sizes"


def _geometry_differences(mine: KVGeometry, theirs: KVGeometry) -> list[str]:
    ours, others = msgspec.structs.asdict(mine), msgspec.structs.asdict(theirs)
    return [
        f"{name} is {ours[name]} here and {others[name]} at the peer"
        for name in ours
        if ours[name] != others[name]
    ]
