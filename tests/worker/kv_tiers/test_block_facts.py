"""Facts that the bytes of a block depend on name its files and keys."""

import msgspec

from pdcluster_worker.kv_tiers.open import BlockFacts
from pdcluster_worker.kv_tiers.shared import fingerprint_of
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.loading.loader import stored_in


def fingerprint(facts: BlockFacts) -> bytes:
    return fingerprint_of(msgspec.json.encode(facts))


def test_a_block_of_another_dtype_is_another_one() -> None:
    """Also one of int8 that was computed in another dtype."""
    computed = [KVGeometry(3, 64, 30, 16, dtype) for dtype in ("bfloat16", "float32")]
    geometries = {
        stored_in(geometry, kind)
        for geometry in computed
        for kind in ("auto", "bf16", "int8", "fp8_e4m3")
    }
    fingerprints = {
        fingerprint(BlockFacts("weights", geometry, "cpu avx2", False)) for geometry in geometries
    }
    assert len(fingerprints) == len(geometries) == 7  # bf16 of bfloat16 is auto


def test_a_block_that_depends_on_its_batch_is_none_of_an_invariant_worker() -> None:
    facts = BlockFacts("weights", KVGeometry(3, 64, 30, 16, "bfloat16"), "cpu avx2", False)
    assert fingerprint(facts) != fingerprint(msgspec.structs.replace(facts, is_invariant=True))
