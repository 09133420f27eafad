"""Carrier over NIXL and its UCX back end: the receiver reads the sender's slots."""

import importlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec

from pdcluster_worker.engine.ports import HasSlots, KVMemory, SlotMemory
from pdcluster_worker.kv_transfer.carrier import (
    RECEIVING_SLOTS,
    SENDING_SLOTS,
    CarrierError,
    Fetch,
    HostSlots,
    Slot,
    SlotPool,
    slots_of,
)

logger = logging.getLogger(__name__)

PROGRESS_MICROSECONDS = 50_000
_READS_OVER_PCIE = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
_BUILDS = ("nixl_cu13._api", "nixl_cu12._api")
"""NIXL is built once for each CUDA; both move host memory without one."""


class _NixlPeer(msgspec.Struct, array_like=True, frozen=True):
    """A carrier, as it says to its peer."""

    name: str
    known: bytes
    # Number of the GPU that has its sending slots; left away where none has, since older.
    device: int | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_NixlPeer).decode


def bindings() -> Any:
    """NIXL's own classes.  Raises ImportError without it."""
    for build in _BUILDS:
        try:
            module: ModuleType = importlib.import_module(build)
        except ModuleNotFoundError:
            continue
        return module.nixlBind
    raise ModuleNotFoundError("no module named nixl")


class NixlCarrier:
    """`carrier.Carrier`.  Raises CarrierError if it does not start, ImportError without NIXL."""

    kind = "nixl"

    def __init__(self, name: str, slot_bytes: int, memory: KVMemory) -> None:
        self._slot_bytes = slot_bytes
        self._memory = memory
        self._nixl = nixl = bindings()
        if isinstance(memory, HasSlots):
            # UCX reads a GPU that shows no NVLink by messages over TCP otherwise, a tenth as fast.
            os.environ.setdefault(_READS_OVER_PCIE, "on")
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_MICROSECONDS
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = nixl.nixlAgent(name, config)
            self._backend = self._agent.createBackend("UCX", {})
            self._exported: Any = None
            self._device: int | None = None
            self.sending = SlotPool(self._make_sending, SENDING_SLOTS)
            self.receiving = SlotPool(self._make_slots, RECEIVING_SLOTS)
            known = self._agent.getLocalPartialMD(self._exported, True, [self._backend])
        except Exception as e:
            raise CarrierError(f"NIXL does not start: {e}") from e
        self._blob = _encode((name, known, *([] if self._device is None else [self._device])))
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()

    def outgoing(self) -> "_NixlOutgoing":
        return _NixlOutgoing(self._blob)

    def incoming(self, blob: bytes) -> "_NixlIncoming":
        try:
            side = _decode(blob)
        except msgspec.MsgspecError as e:
            raise CarrierError(f"not what a NIXL carrier says of itself: {e}") from e
        with self._lock:
            if not self._users[side.name]:
                self._load(side.name, side.known)
            self._users[side.name] += 1
        return _NixlIncoming(self, side.name, side.device)

    def read(self, source: tuple[str, int | None], place: int, num_bytes: int, slot: Slot) -> Fetch:
        """Begin to read from an agent that was loaded.  Raises CarrierError."""
        (name, device), operation = source, self._nixl.NIXL_READ
        with self._lock:
            self._users[name] += 1  # it stays loaded until the read has ended
        try:
            own = self._end(slot.memory.device, slot.address, num_bytes)
            there = self._end(device, place, num_bytes)
            request = self._agent.createXferReq(operation, own, there, name, "", [self._backend])
        except Exception as e:
            self.leave(name)
            raise CarrierError(f"NIXL cannot read: {e}") from e
        return self._reading(name, request)

    def leave(self, name: str) -> None:
        """One use of an agent less; with the last it is forgotten."""
        with self._lock:
            self._users[name] -= 1
            if self._users[name]:
                return
            del self._users[name]
            try:
                self._agent.invalidateRemoteMD(name)
            except Exception as e:
                raise CarrierError(f"NIXL cannot forget {name}: {e}") from e

    def close(self) -> None:
        """NIXL ends its thread with its agent."""
        self._agent = None

    def _reading(self, name: str, request: int) -> Fetch:
        """Begin it; it is freed once it has ended."""
        has_ended = False

        def note(state: Callable[[], Any]) -> bool:
            nonlocal has_ended
            try:
                has_ended = bool(state() == self._nixl.NIXL_SUCCESS)
            except Exception as e:
                has_ended = True
                raise CarrierError(f"NIXL's read failed: {e}") from e
            finally:
                if has_ended:
                    self._agent.releaseXferReq(request)
                    self.leave(name)
            return has_ended

        note(lambda: self._agent.postXferReq(request))
        return lambda: has_ended or note(lambda: self._agent.getXferStatus(request))

    def _load(self, name: str, known: bytes) -> None:
        try:
            loaded = self._agent.loadRemoteMD(known).decode()
        except Exception as e:
            raise CarrierError(f"NIXL cannot reach its peer: {e}") from e
        if loaded != name:
            raise CarrierError(f"NIXL's peer is {loaded}, and calls itself {name}")

    def _make_sending(self, num_slots: int) -> list[Slot]:
        slots = self._make_slots(num_slots)
        memory, num_bytes = slots[0].memory, num_slots * self._slot_bytes
        self._exported, self._device = self._described(memory, num_bytes), memory.device
        return slots

    def _make_slots(self, num_slots: int) -> list[Slot]:
        num_bytes = num_slots * self._slot_bytes
        memory = self._on_device(num_bytes)
        if memory is None:
            memory = self._registered(HostSlots(self._memory, num_bytes), num_bytes)
        return slots_of(memory, self._slot_bytes, num_slots)

    def _on_device(self, num_bytes: int) -> SlotMemory | None:
        """Memory where the blocks are; None where they are on no device, or it cannot be had."""
        if not isinstance(self._memory, HasSlots):
            return None
        try:
            return self._registered(self._memory.slots(num_bytes), num_bytes)
        except Exception as e:
            logger.warning("KV goes through host memory: NIXL has no slots on the device: %s", e)
            return None

    def _registered(self, memory: SlotMemory, num_bytes: int) -> SlotMemory:
        self._agent.registerMem(self._described(memory, num_bytes), [self._backend])
        return memory

    def _described(self, memory: SlotMemory, num_bytes: int) -> Any:
        kind, number = self._where(memory.device)
        return self._nixl.nixlRegDList(kind, [(memory.address, num_bytes, number, "")])

    def _end(self, device: int | None, address: int, num_bytes: int) -> Any:
        kind, number = self._where(device)
        return self._nixl.nixlXferDList(kind, [(address, num_bytes, number)])

    def _where(self, device: int | None) -> tuple[Any, int]:
        nixl = self._nixl
        return (nixl.DRAM_SEG, 0) if device is None else (nixl.VRAM_SEG, device)


class _NixlOutgoing:
    """A slot's number is its address, which the receiver reads from."""

    def __init__(self, blob: bytes) -> None:
        self.blob = blob

    def connect(self, blob: bytes) -> None:
        """There is nothing to know of a reader."""

    def post(self, slot: Slot, num_bytes: int) -> int:
        return slot.address

    def close(self) -> None:
        """Nothing is kept."""


class _NixlIncoming:
    blob = b""

    def __init__(self, carrier: NixlCarrier, name: str, device: int | None) -> None:
        self._carrier = carrier
        self._source = name, device

    def fetch(self, place: int, num_bytes: int, slot: Slot) -> Fetch:
        return self._carrier.read(self._source, place, num_bytes, slot)

    def close(self) -> None:
        self._carrier.leave(self._source[0])
