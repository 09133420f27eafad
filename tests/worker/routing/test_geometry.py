"""The pair check of the handshake [N2]: each field refuses alone, with a reason that names it and
both values.
"""

import msgspec
import pytest

from pdcluster_worker.messages.facts import KVGeometry, PeerFacts
from pdcluster_worker.routing.geometry import mismatch, reason_label

GEOMETRY = KVGeometry(num_kv_heads=3, head_dim=64, num_layers=30, block_size=16, dtype="bfloat16")
MINE = PeerFacts(geometry=GEOMETRY, weights="aa11", revision="r1")


def with_geometry(**changes: object) -> PeerFacts:
    return PeerFacts(
        geometry=msgspec.structs.replace(GEOMETRY, **changes), weights="aa11", revision="r1"
    )


def test_pair_of_equals_matches() -> None:
    theirs = PeerFacts(geometry=msgspec.structs.replace(GEOMETRY), weights="aa11", revision="r1")

    assert mismatch(MINE, theirs) is None
    assert reason_label(MINE, theirs) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_kv_heads", 4),
        ("head_dim", 128),
        ("num_layers", 31),
        ("block_size", 32),
        ("dtype", "float32"),
        ("kind", "mla"),
    ],
)
def test_pair_geometry_field_refuses_with_both_values(field: str, value: object) -> None:
    theirs = with_geometry(**{field: value})
    reason = mismatch(MINE, theirs)

    assert reason is not None
    assert f"{field} is {getattr(GEOMETRY, field)} here and {value} at the peer" in reason
    assert reason_label(MINE, theirs) == "kv_geometry"


def test_pair_geometry_every_field_is_compared() -> None:
    assert {"num_kv_heads", "head_dim", "num_layers", "block_size", "dtype", "kind"} == set(
        KVGeometry.__struct_fields__
    )


def test_pair_geometry_names_all_fields_that_differ() -> None:
    reason = mismatch(MINE, with_geometry(block_size=32, dtype="float32"))

    assert reason is not None
    assert (
        "block_size is 16 here and 32 at the peer, dtype is bfloat16 here and float32 at the peer"
        in reason
    )


@pytest.mark.parametrize(
    ("theirs", "label", "values"),
    [
        (
            PeerFacts(GEOMETRY, "bb22", "r1"),
            "weights",
            "weights fingerprint is aa11 here and bb22 at the peer",
        ),
        (PeerFacts(GEOMETRY, "aa11", "r2"), "revision", "revision is r1 here and r2 at the peer"),
        (
            PeerFacts(GEOMETRY, "aa11", "r1", operations="cpu avx2"),
            "operations",
            "operations are not batch-invariant here and cpu avx2 at the peer",
        ),
    ],
)
def test_pair_refuses_other_weights_and_revision(
    theirs: PeerFacts, label: str, values: str
) -> None:
    reason = mismatch(MINE, theirs)

    assert reason is not None
    assert values in reason
    assert reason_label(MINE, theirs) == label


def test_pair_with_other_kernels_is_refused_where_equal_bits_are_promised() -> None:
    amx, avx2 = (
        PeerFacts(GEOMETRY, "aa11", "r1", operations=operations)
        for operations in ("cpu amx", "cpu avx2")
    )
    reason = mismatch(amx, avx2)

    assert reason is not None
    assert "operations are cpu amx here and cpu avx2 at the peer" in reason
    assert "under engine.batchInvariant run both on CPUs of one kind" in reason
    assert mismatch(amx, amx) is None


def test_pair_reports_geometry_before_weights_before_revision() -> None:
    other_geometry = msgspec.structs.replace(GEOMETRY, block_size=8)

    assert reason_label(MINE, PeerFacts(other_geometry, "bb22", "r2")) == "kv_geometry"
    assert reason_label(MINE, PeerFacts(GEOMETRY, "bb22", "r2")) == "weights"


def of_size(size: int) -> PeerFacts:
    return PeerFacts(GEOMETRY, "aa11", "r1", size)


@pytest.mark.parametrize(("mine", "theirs"), [(2, 1), (1, 2), (2, 4), (8, 2), (3, 3)])
def test_pair_of_unequal_tensor_parallel_sizes_matches_where_one_divides_the_other(
    mine: int, theirs: int
) -> None:
    assert mismatch(of_size(mine), of_size(theirs)) is None


def test_pair_of_tensor_parallel_sizes_that_do_not_divide_is_refused_with_both() -> None:
    reason = mismatch(of_size(2), of_size(3))

    assert reason is not None
    assert "tensor-parallel size is 2 here and 3 at the peer: one must divide the other" in reason
    assert (
        reason_label(of_size(2), of_size(3))
        == reason_label(of_size(3), of_size(2))
        == "tensor_parallel"
    )


def test_pair_verdict_is_the_same_on_both_sides() -> None:
    for theirs in (
        MINE,
        with_geometry(head_dim=32),
        PeerFacts(GEOMETRY, "bb22", "r1"),
        PeerFacts(GEOMETRY, "aa11", "r2"),
    ):
        assert reason_label(MINE, theirs) == reason_label(theirs, MINE)


def test_pair_with_a_router_compares_revision_and_model_alone() -> None:
    router = PeerFacts(KVGeometry(0, 0, 0, 0, ""), "", "r1", model="chat", has_engine=False)
    chat = PeerFacts(
        GEOMETRY, "aa11", "r1", tensor_parallel_size=3, operations="cpu amx", model="chat"
    )

    assert mismatch(router, chat) is mismatch(chat, router) is None
    assert mismatch(router, MINE) is None  # of an older worker, which does not say its model
    assert reason_label(router, PeerFacts(GEOMETRY, "aa11", "r2", model="chat")) == "revision"
    reason = mismatch(router, PeerFacts(GEOMETRY, "aa11", "r1", model="code"))
    assert (
        reason == "model is chat here and code at the peer: give both workers the same model.name"
    )
