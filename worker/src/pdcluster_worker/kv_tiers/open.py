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
from pdcluster_worker.kv_tiers.directory_store import DirectoryStore
from pdcluster_worker.kv_tiers.disk import DiskTier
from pdcluster_worker.kv_tiers.host import HostTier
from pdcluster_worker.kv_tiers.shared import MOST_KNOWN, SharedTier, Store, fingerprint_of
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
    encoded = msgspec.json.encode(facts)
    tiers: list[TierMemory] = []
    for config in configs:
        name = f"engine.kvTiers of type {config.type}"
        if config.url is None and config.size < 2 * block_bytes + DiskTier.OVERHEAD:
            raise ModelError(
                f"{name}: size {config.size} holds no two KV blocks of {block_bytes} bytes: raise "
                "it, or leave the tier out"
            )
        if config.type == "host":
            num_slots = config.size // block_bytes
            tiers.append(HostTier("host", reserve(num_slots * block_bytes), num_slots, block_bytes))
        elif config.type == "disk":
            assert config.path is not None
            tiers.append(DiskTier("disk", Path(config.path), config.size, block_bytes, encoded))
        else:
            tiers.append(_open_shared(name, config, block_bytes, fingerprint_of(encoded)))
    return TierCopier(memory, heads, tiers, wake)


def _open_shared(
    name: str, config: KvTierConfig, block_bytes: int, fingerprint: bytes
) -> SharedTier:
    if config.url is None:
        assert config.path is not None
        store: Store = DirectoryStore(
            name, Path(config.path), config.size, block_bytes, fingerprint
        )
        return SharedTier("shared", store, fingerprint, block_bytes, config.size // block_bytes)
    from pdcluster_worker.kv_tiers.redis_store import RedisStore  # only with a server

    password = None if config.password_file is None else Path(config.password_file)
    store = RedisStore(name, config.url, password, fingerprint)
    return SharedTier("shared", store, fingerprint, block_bytes, MOST_KNOWN)


class BlockFacts(msgspec.Struct, frozen=True):
    """Facts that the bytes of a block depend on, beside its tokens."""

    weights: str  # fingerprint, whatever their precision
    geometry: KVGeometry
    operations: str  # that compute: others differ in the last bits
    is_invariant: bool  # bits do not depend on the batch that a block was computed in
    precision: str = ""  # of the weights
    is_mixed: bool = False  # blocks may have come from weights of another precision
