"""A stock engine's KV events as ours: our hashes are recomputed from the tokens it names.

A model with several kinds of layers has a group of KV blocks for each, whose blocks have the same
hashes and end at different times.  A prefix is no longer than what full attention has, so its first
group is followed and no other.  Blocks with an unknown parent or foreign keys are left out; a gap
in the sequence clears all.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from pdcluster_schema.ports import join_address
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.messages.block_hash import next_hash
from pdcluster_worker.messages.engine import BlockEvents

logger = logging.getLogger(__name__)

EngineHash = int | bytes

_FULL_ATTENTION = {None, "full_attention", "mla_attention", "sink_full_attention"}
"""Kinds of groups whose leading blocks are a prefix; None = not said."""


class BlockStored(msgspec.Struct, tag=True):
    """New reusable blocks, in the order of one chain."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int | tuple[int, int]]  # with its next one, of SGLang that speculates
    block_size: int
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    medium: str | None = None
    cache_salt: str | None = None  # of SGLang, in each event


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[EngineHash]
    group_idx: int | None = None
    medium: str | None = None


@dataclass(frozen=True, slots=True)
class _Stored:
    """A block of the engine's: one of ours or, where its group has larger blocks, several."""

    hashes: tuple[bytes, ...]
    salt: bytes


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_decode = msgspec.msgpack.Decoder(_Batch).decode


class CacheEvents:
    """Follows one engine's cache from its start."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._group: int | None = None  # that is followed, once it is known
        # by medium, since a block may be on the GPU and offloaded
        self._stored: defaultdict[str | None, dict[EngineHash, _Stored]] = defaultdict(dict)
        self._held: Counter[bytes] = Counter()  # our hash -> number of the engine's blocks
        self._next: int | None = None  # sequence of the engine's next batch
        self._sequence = 0  # of our last events

    def __len__(self) -> int:
        return len(self._held)

    def take(self, sequence: int, payload: bytes) -> BlockEvents | None:
        """None where the batch changes nothing.  Raises msgspec.DecodeError."""
        batch = _decode(payload)
        is_cleared = self._next is not None and sequence != self._next
        self._next = sequence + 1
        if is_cleared:
            self._forget()
        stored: dict[bytes, None] = {}
        removed: dict[bytes, None] = {}
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event, stored, removed)
                case BlockRemoved():
                    self._remove(event, stored, removed)
                case AllBlocksCleared():
                    self._forget()
                    is_cleared = True
        if is_cleared:
            return self.snapshot()
        if not stored and not removed:
            return None
        self._sequence += 1
        return BlockEvents(list(stored), list(removed), self._sequence)

    def snapshot(self) -> BlockEvents:
        self._sequence += 1
        return BlockEvents(list(self._held), [], self._sequence, is_cleared=True)

    def matched(self, hashes: list[bytes]) -> int:
        """Leading `hashes` that are in the cache."""
        count = 0
        for block in hashes:
            if block not in self._held:
                break
            count += 1
        return count

    def _forget(self) -> None:
        self._stored.clear()
        self._held.clear()

    def _store(
        self, event: BlockStored, stored: dict[bytes, None], removed: dict[bytes, None]
    ) -> None:
        size, num_tokens = self._block_size, event.block_size
        # a group that leaves out blocks names the tokens of all, and an offloaded block has none
        is_whole = len(event.token_ids) == num_tokens * len(event.block_hashes) > 0
        if num_tokens % size or not is_whole or not self._follows(event):
            return
        parent, salt = self._parent(event)
        if salt is None:
            return
        known = self._stored[event.medium]
        tokens = [each if isinstance(each, int) else each[0] for each in event.token_ids]
        for index, theirs in enumerate(event.block_hashes):
            images, others = _keys(event, index)
            # where an image ends is not said, so which of several blocks of ours have it is unknown
            if (parent is not None and others) or (images and num_tokens != size):
                return
            ours = []
            for start in range(index * num_tokens, (index + 1) * num_tokens, size):
                parent = next_hash(parent, tokens[start : start + size], salt, images)
                ours.append(parent)
            if theirs not in known:
                known[theirs] = _Stored(tuple(ours), salt)
                self._held.update(ours)
                stored.update(dict.fromkeys(ours))
                for block in ours:
                    removed.pop(block, None)

    def _follows(self, event: BlockStored) -> bool:
        group = event.group_idx or 0
        if self._group is None and event.kv_cache_spec_kind in _FULL_ATTENTION:
            self._group = group
        return group == self._group

    def _parent(self, event: BlockStored) -> tuple[bytes | None, bytes | None]:
        """(our hash of the block before or None, salt); a salt of None = leave the event out."""
        if event.parent_block_hash is None:
            return None, _salt(event)
        for known in self._stored.values():
            if (parent := known.get(event.parent_block_hash)) is not None:
                return parent.hashes[-1], parent.salt
        return None, None

    def _remove(
        self, event: BlockRemoved, stored: dict[bytes, None], removed: dict[bytes, None]
    ) -> None:
        if event.group_idx not in (None, self._group):
            return
        for theirs in event.block_hashes:
            block = self._stored[event.medium].pop(theirs, None)
            for ours in () if block is None else block.hashes:
                self._held[ours] -= 1
                if not self._held[ours]:
                    del self._held[ours]
                    stored.pop(ours, None)
                    removed[ours] = None


class Subscription:
    """A socket that the engine connects to, so a restarted engine finds it."""

    def __init__(self, host: str, port: int, on_batch: Callable[[int, bytes], None]) -> None:
        self._address = join_address(host, port)
        self._on_batch = on_batch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.subscribe(b"")
        self._loop = asyncio.get_running_loop()

    def open(self) -> None:
        """Raises ConfigError when the port cannot be used."""
        try:
            self._socket.bind(f"tcp://{self._address}")
        except zmq.ZMQError as e:
            message = f"engine.vllm.kvEventsPort: {self._address} cannot be used: {e}"
            raise ConfigError(message) from e
        self._loop.add_reader(self._socket.fileno(), self._poll)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
        self._context.term()

    def _poll(self) -> None:
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            match self._socket.recv_multipart(zmq.NOBLOCK):
                case [_, sequence, payload]:
                    self._on_batch(int.from_bytes(sequence, "big"), payload)
                case frames:
                    logger.warning("ignored KV events of %d frames in place of 3", len(frames))


def _keys(event: BlockStored, index: int) -> tuple[list[tuple[str, int]], list[Any]]:
    """Keys that a block's hash has beside tokens and adapter: those of images, and others."""
    keys = (event.extra_keys[index] if event.extra_keys else None) or []
    if event.lora_name and keys[:1] == [event.lora_name]:
        keys = keys[1:]
    images, others = list[tuple[str, int]](), list[Any]()
    for key in keys:
        match key:
            case [digest, offset]:
                images.append((digest, offset))
            case _:
                others.append(key)
    return images, others


def _salt(event: BlockStored) -> bytes | None:
    """Our salt of a prompt's first block; None where the block has other keys."""
    keys = [event.cache_salt] if event.cache_salt is not None else _keys(event, 0)[1]
    if not keys:
        # that of an adapter's requests has its name in it
        return None if event.lora_name else b""
    if len(keys) > 1 or not isinstance(keys[0], str):
        return None
    try:
        return bytes.fromhex(keys[0])
    except ValueError:
        return None
