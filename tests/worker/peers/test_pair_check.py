"""The pair check of the handshake [N2]: each field refuses alone, with a reason that names it and
both values.
"""

from typing import Any

import pytest
from msgspec.structs import replace

from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.peers import Hello
from pdcluster_worker.peers.pair_check import mismatch

GEOMETRY = KVGeometry(num_kv_heads=3, head_dim=64, num_layers=30, block_size=16, dtype="bfloat16")
ROUTER = Hello("e", "router", KVGeometry(0, 0, 0, 0, ""), "", "r1", model="chat")
OTHERS = {
    "num_kv_heads": 4,
    "head_dim": 128,
    "num_layers": 31,
    "block_size": 32,
    "dtype": "float32",
    "kind": "mla",
    "computed_dtype": "float32",
}


def facts(**changes: Any) -> Hello:
    geometry = {name: changes.pop(name) for name in OTHERS if name in changes}
    mine = Hello("e", "decode", replace(GEOMETRY, **geometry), "aa11", "r1")
    return replace(mine, **changes)


MIXED = facts(precision="bfloat16", mixes_precisions=True)


def test_engines_of_two_versions_are_to_get_one() -> None:
    _, reason = mismatch(facts(kind="vllm-0.31.0-nixl"), facts(kind="vllm-0.32.0-nixl")) or ("", "")

    assert reason == (
        "KV geometry differs: kind is vllm-0.31.0-nixl here and vllm-0.32.0-nixl at the peer; give "
        "the engines of both workers one version of vLLM, to the last digit"
    )


def test_another_kv_cache_dtype_names_its_field() -> None:
    theirs = facts(dtype="int8", computed_dtype="bfloat16")

    label, reason = mismatch(facts(), theirs) or ("", "")

    assert label == "kv_geometry"
    assert reason == (
        "KV geometry differs: dtype is bfloat16 here and int8 at the peer, computed_dtype is not "
        "given here and bfloat16 at the peer; set the same engine.kvCacheDtype and model.dtype for "
        "both, and give both workers the same model and the same engine sizes"
    )


def test_every_field_of_the_geometry_is_compared() -> None:
    assert set(OTHERS) == set(KVGeometry.__struct_fields__)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (facts(), facts()),
        *(
            (facts(tensor_parallel_size=one), facts(tensor_parallel_size=other))
            for one, other in [(2, 1), (1, 2), (2, 4), (8, 2), (3, 3)]
        ),
        (facts(operations="cpu amx"), facts(operations="cpu amx")),
        (facts(precision="int8"), facts(precision="int8")),
        (MIXED, replace(MIXED, precision="int8")),
        (ROUTER, facts(tensor_parallel_size=3, operations="cpu amx", model="chat")),
        (facts(tensor_parallel_size=3, operations="cpu amx", model="chat"), ROUTER),
        (ROUTER, facts()),  # of an older worker, which does not say its model
    ],
)
def test_pair_matches(mine: Hello, theirs: Hello) -> None:
    assert mismatch(mine, theirs) is None


@pytest.mark.parametrize(
    ("mine", "theirs", "label", "words"),
    [
        *(
            (
                facts(),
                facts(**{field: value}),
                "kv_geometry",
                f"{field} is {getattr(GEOMETRY, field) or 'not given'} here and {value} at the "
                "peer",
            )
            for field, value in OTHERS.items()
        ),
        (
            facts(),
            facts(block_size=32, dtype="float32"),
            "kv_geometry",
            "block_size is 16 here and 32 at the peer, dtype is bfloat16 here and float32 at the "
            "peer",
        ),
        (facts(), facts(block_size=8, weights="bb22", revision="r2"), "kv_geometry", ""),
        (facts(), facts(weights="bb22", revision="r2"), "weights", ""),
        (
            facts(),
            facts(weights="bb22"),
            "weights",
            "weights fingerprint is aa11 here and bb22 at the peer",
        ),
        (
            facts(precision="bfloat16"),
            facts(precision="int8"),
            "precision",
            "engine.quantization for both, or engine.allowMixedPrecision: true for both",
        ),
        (facts(precision="bfloat16"), replace(MIXED, precision="int8"), "precision", ""),
        (
            replace(MIXED, operations="cpu amx"),
            replace(MIXED, precision="int8", operations="cpu amx"),
            "precision",
            "without engine.batchInvariant",
        ),
        (facts(), facts(revision="r2"), "revision", "revision is r1 here and r2 at the peer"),
        (
            facts(),
            facts(operations="cpu avx2"),
            "operations",
            "operations are not batch-invariant here and cpu avx2 at the peer",
        ),
        (
            facts(operations="cpu amx"),
            facts(operations="cpu avx2"),
            "operations",
            "under engine.batchInvariant run both on CPUs of one kind",
        ),
        (
            facts(tensor_parallel_size=2),
            facts(tensor_parallel_size=3),
            "tensor_parallel",
            "tensor-parallel size is 2 here and 3 at the peer: one must divide the other",
        ),
        (ROUTER, facts(revision="r2", model="chat"), "revision", ""),
        (
            ROUTER,
            facts(model="code"),
            "model",
            "model is chat here and code at the peer: give both workers the same model.name",
        ),
    ],
)
def test_pair_is_refused_by_both_sides_with_both_values(
    mine: Hello, theirs: Hello, label: str, words: str
) -> None:
    found, back = mismatch(mine, theirs), mismatch(theirs, mine)

    assert found is not None
    assert back is not None
    assert found[0] == back[0] == label
    assert words in found[1]


def test_a_refusal_for_the_precision_names_both() -> None:
    _, reason = mismatch(facts(precision="bfloat16"), facts(precision="int8")) or ("", "")

    assert reason.startswith("weights are held in bfloat16 here and in int8 at the peer: set")
