"""Opens the tiers of an engine's settings."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdcluster_worker.config.engine import KvTierConfig
from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.engine.tier_ports import NO_TIERS, KVTierIO
from pdcluster_worker.errors import ModelError
from pdcluster_worker.kv_tiers.copier import TierCopier, TierMemory
from pdcluster_worker.kv_tiers.disk import DiskTier
from pdcluster_worker.kv_tiers.host import HostTier
from pdcluster_worker.messages.facts import KVGeometry

Reserve = Callable[[int], Any]
"""A writable buffer of so many bytes.  Raises ModelError."""


def open_tiers(
    configs: Sequence[KvTierConfig],
    memory: KVMemory,
    facts: "BlockFacts",
    reserve: Reserve,
    wake: Callable[[], None],
) -> KVTierIO:
    """Raises ModelError where a tier holds no block, or cannot be had."""
    if not configs:
        return NO_TIERS
    heads = range(facts.geometry.num_kv_heads)
    block_bytes = len(heads) * memory.head_bytes
    tiers: list[TierMemory] = []
    for config in configs:
        name = f"engine.kvTiers of type {config.type}"
        if config.size < 2 * block_bytes + DiskTier.OVERHEAD:
            raise ModelError(
                f"{name}: size {config.size} holds no two KV blocks of {block_bytes} bytes: raise "
                "it, or leave the tier out"
            )
        if config.type == "host":
            num_slots = config.size // block_bytes
            tiers.append(HostTier("host", reserve(num_slots * block_bytes), num_slots, block_bytes))
        else:
            assert config.path is not None
            fingerprint = msgspec.json.encode(facts)
            tiers.append(DiskTier("disk", Path(config.path), config.size, block_bytes, fingerprint))
    return TierCopier(memory, heads, tiers, wake)


class BlockFacts(msgspec.Struct, frozen=True):
    """Facts that the bytes of a block depend on, beside its tokens."""

    weights: str  # fingerprint
    geometry: KVGeometry
    operations: str  # that compute: others differ in the last bits
