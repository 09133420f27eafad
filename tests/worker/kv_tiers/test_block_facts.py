"""Facts that the bytes of a block depend on name its files and keys."""

import msgspec

from pdcluster_worker.kv_tiers.open import BlockFacts
from pdcluster_worker.kv_tiers.shared import fingerprint_of
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.loading.loader import stored_in


def test_a_block_of_another_dtype_is_another_one() -> None:
    """Also one of int8 that was computed in another dtype."""
    computed = [KVGeometry(3, 64, 30, 16, dtype) for dtype in ("bfloat16", "float32")]
    geometries = {
        stored_in(geometry, kind)
        for geometry in computed
        for kind in ("auto", "bf16", "int8", "fp8_e4m3")
    }
    fingerprints = {
        fingerprint_of(msgspec.json.encode(BlockFacts("weights", geometry, "cpu avx2")))
        for geometry in geometries
    }
    assert len(fingerprints) == len(geometries) == 7  # bf16 of bfloat16 is auto
