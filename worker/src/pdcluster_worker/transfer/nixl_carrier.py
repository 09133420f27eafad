"""Carrier over NIXL and its UCX back end: the receiver reads the sender's slots.

One-sided, and only ever a read: a port gives away the keys of its sending slots alone, so no peer
can write here.  NIXL's own Python class makes its progress thread spin; ours waits in the kernel
for UCX's events and looks by itself every PROGRESS_MICROSECONDS, since UCX may miss one.
"""

import importlib
import mmap
import threading
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from pdcluster_worker.transfer.carrier import (
    RECEIVING_SLOTS,
    SENDING_SLOTS,
    CarrierError,
    Slot,
    SlotPool,
)

PROGRESS_MICROSECONDS = 50_000
_BUILDS = ("nixl_cu13._api", "nixl_cu12._api")
"""NIXL is built once for each CUDA; both move host memory without one."""

_Blob = tuple[str, bytes]
_encode = msgspec.msgpack.Encoder().encode
_decode: msgspec.msgpack.Decoder[_Blob] = msgspec.msgpack.Decoder(_Blob)


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
    """`carrier.Carrier`; name: unique among all agents that may meet.

    Raises CarrierError where NIXL or UCX does not start, ImportError without NIXL.
    """

    kind = "nixl"

    def __init__(self, name: str, slot_bytes: int) -> None:
        self._name = name
        self._slot_bytes = slot_bytes
        self._nixl = nixl = bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_MICROSECONDS
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = nixl.nixlAgent(name, config)
            self._backend = self._agent.createBackend("UCX", {})
            self._exported: Any = None
            self.sending = SlotPool(self._make_sending, SENDING_SLOTS)
            self.receiving = SlotPool(self._make_slots, RECEIVING_SLOTS)
            known = self._agent.getLocalPartialMD(self._exported, True, [self._backend])
        except Exception as e:
            raise CarrierError(f"NIXL does not start: {e}") from e
        self._blob = _encode((name, known))
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()

    def outgoing(self) -> "_Outgoing":
        """See carrier.Carrier."""
        return _Outgoing(self._blob)

    def incoming(self, blob: bytes) -> "_Incoming":
        """See carrier.Carrier."""
        try:
            name, known = _decode.decode(blob)
        except msgspec.MsgspecError as e:
            raise CarrierError(f"not what a NIXL carrier says of itself: {e}") from e
        with self._lock:
            if not self._users[name]:
                self._load(name, known)
            self._users[name] += 1
        return _Incoming(self, name)

    def read(self, name: str, place: int, num_bytes: int, slot: Slot) -> "_Read":
        """Begin to read from an agent that was loaded.  Raises CarrierError."""
        nixl, agent = self._nixl, self._agent
        here = nixl.nixlXferDList(nixl.DRAM_SEG, [(slot.address, num_bytes, 0)])
        there = nixl.nixlXferDList(nixl.DRAM_SEG, [(place, num_bytes, 0)])
        with self._lock:
            self._users[name] += 1  # it stays loaded until the read has ended
        try:
            request = agent.createXferReq(nixl.NIXL_READ, here, there, name, "", [self._backend])
        except Exception as e:
            self.leave(name)
            raise CarrierError(f"NIXL cannot read: {e}") from e
        return _Read(self, name, request)

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

    def post(self, request: int) -> bool:
        """Begin; True where it has ended by that.  Raises what NIXL raises."""
        return bool(self._agent.postXferReq(request) == self._nixl.NIXL_SUCCESS)

    def look(self, request: int) -> bool:
        """Return whether it has ended.  Raises what NIXL raises."""
        return bool(self._agent.getXferStatus(request) == self._nixl.NIXL_SUCCESS)

    def release(self, request: int) -> None:
        """Free a request that has ended."""
        self._agent.releaseXferReq(request)

    def close(self) -> None:
        """See carrier.Carrier; NIXL ends its thread with its agent."""
        self._agent = None

    def _load(self, name: str, known: bytes) -> None:
        try:
            loaded = self._agent.loadRemoteMD(known).decode()
        except Exception as e:
            raise CarrierError(f"NIXL cannot reach its peer: {e}") from e
        if loaded != name:
            raise CarrierError(f"NIXL's peer is {loaded}, and calls itself {name}")

    def _make_sending(self, num_slots: int) -> list[Slot]:
        slots = self._make_slots(num_slots)
        num_bytes = num_slots * self._slot_bytes
        self._exported = self._registered(slots[0].address, num_bytes)
        return slots

    def _make_slots(self, num_slots: int) -> list[Slot]:
        size = self._slot_bytes
        memory = np.frombuffer(mmap.mmap(-1, num_slots * size), np.uint8)
        address = memory.ctypes.data
        self._agent.registerMem(self._registered(address, len(memory)), [self._backend])
        return [
            Slot(memory[start : start + size], address + start)
            for start in range(0, len(memory), size)
        ]

    def _registered(self, address: int, num_bytes: int) -> Any:
        return self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, num_bytes, 0, "")])


class _Outgoing:
    """A slot's number is its address, which the receiver reads from."""

    def __init__(self, blob: bytes) -> None:
        self.blob = blob

    def connect(self, blob: bytes) -> None:
        """There is nothing to know of a reader."""

    def post(self, slot: Slot, num_bytes: int) -> int:
        return slot.address

    def close(self) -> None:
        """Nothing is kept."""


class _Incoming:
    blob = b""

    def __init__(self, carrier: NixlCarrier, name: str) -> None:
        self._carrier = carrier
        self._name = name

    def fetch(self, place: int, num_bytes: int, slot: Slot) -> "_Read":
        return self._carrier.read(self._name, place, num_bytes, slot)

    def close(self) -> None:
        self._carrier.leave(self._name)


class _Read:
    """One read, which is freed once it has ended."""

    def __init__(self, carrier: NixlCarrier, name: str, request: int) -> None:
        self._carrier = carrier
        self._name = name
        self._request = request
        self._has_ended = False
        self._noted(carrier.post)

    def is_done(self) -> bool:
        return self._has_ended or self._noted(self._carrier.look)

    def _noted(self, ask: Callable[[int], bool]) -> bool:
        try:
            self._has_ended = ask(self._request)
        except Exception as e:
            self._has_ended = True
            raise CarrierError(f"NIXL's read failed: {e}") from e
        finally:
            if self._has_ended:
                self._carrier.release(self._request)
                self._carrier.leave(self._name)
        return self._has_ended
