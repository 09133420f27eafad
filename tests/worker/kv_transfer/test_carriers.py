"""Payloads that a carrier brings: fences wait for none, late ones land nowhere, and a carrier that
does not work is not used.

The carrier here brings a payload when the test says so; the rest is real, over sockets.
"""

import threading
from collections.abc import Callable
from functools import partial

import pytest

from pdcluster_worker.engine.ports import BlocksSent, Fenced, KVMemory, SendEnded, TransferRoute
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.kv_transfer import carriers, tcp, tcp_inbound, wire
from pdcluster_worker.kv_transfer.carrier import (
    SENDING_SLOTS,
    CarrierError,
    HostSlots,
    Slot,
    SlotPool,
    slots_of,
)
from pdcluster_worker.kv_transfer.carriers import Carriers, open_carriers
from tests.worker.kv_transfer.conftest import ByteMemory, Engine


class Shelf:
    """Offers of all carriers of a test, by number; what is held back comes once it is let go.

    reads: numbers in the order in which they were fetched.  broken: why nothing can be fetched.
    most_bytes: beyond which a fetch fails.
    """

    def __init__(self) -> None:
        self.offers: list[tuple[Slot, int]] = []
        self.reads: list[int] = []
        self.num_attached = 0
        self.flow = threading.Event()
        self.flow.set()
        self.broken: str | None = None
        self.most_bytes = 1 << 30
        self.damages = False


class ShelfFetch:
    """Brings the bytes that lie there at the moment when they are let go."""

    def __init__(self, shelf: Shelf, source: Slot, num_bytes: int, slot: Slot) -> None:
        self.shelf, self.source, self.num_bytes, self.slot = shelf, source, num_bytes, slot
        self.has_come = False

    def __call__(self) -> bool:
        if self.shelf.broken is not None:
            raise CarrierError(self.shelf.broken)
        if self.num_bytes > self.shelf.most_bytes:
            raise CarrierError("not as much")
        if self.shelf.flow.is_set() and not self.has_come:
            self.slot.bytes[: self.num_bytes] = self.source.bytes[: self.num_bytes]
            self.slot.bytes[0] ^= self.shelf.damages
            self.has_come = True
        return self.has_come


class ShelfSide:
    """Both sides of a connection."""

    blob = b"shelf"

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def connect(self, blob: bytes) -> None:
        assert blob == self.blob

    def post(self, slot: Slot, num_bytes: int) -> int:
        self.shelf.offers.append((slot, num_bytes))
        return len(self.shelf.offers) - 1

    def fetch(self, place: int, num_bytes: int, slot: Slot) -> ShelfFetch:
        self.shelf.reads.append(place)
        return ShelfFetch(self.shelf, self.shelf.offers[place][0], num_bytes, slot)

    def close(self) -> None: ...


class ShelfCarrier:
    def __init__(self, shelf: Shelf, memory: KVMemory, kind: str = "nixl") -> None:
        self.kind = kind
        self.shelf = shelf
        self.sending = SlotPool(partial(make_slots, memory), SENDING_SLOTS)
        self.receiving = SlotPool(partial(make_slots, memory), 1)

    def outgoing(self) -> ShelfSide:
        return ShelfSide(self.shelf)

    def incoming(self, blob: bytes) -> ShelfSide:
        self.shelf.num_attached += 1
        assert blob == ShelfSide.blob
        return ShelfSide(self.shelf)

    def close(self) -> None: ...


def make_slots(memory: KVMemory, num_slots: int) -> list[Slot]:
    return slots_of(HostSlots(memory, num_slots * wire.FRAME_BYTES), wire.FRAME_BYTES, num_slots)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


MakePair = Callable[..., tuple[Engine, Engine]]


@pytest.fixture
def pair_over(
    monkeypatch: pytest.MonkeyPatch, shelf: Shelf, tcp_engine: Callable[..., Engine]
) -> MakePair:
    """A pair whose sides have these kinds of carriers; each is a shelf."""

    def make(prefill: str = "nixl", decode: str = "nixl") -> tuple[Engine, Engine]:
        kinds = iter([prefill, decode])

        def opened(_requested: str, _name: str, _bytes: int, memory: KVMemory) -> Carriers:
            kind = next(kinds)
            return Carriers(kind, {kind: ShelfCarrier(shelf, memory, kind)} if kind else {})

        monkeypatch.setattr(tcp, "open_carriers", opened)
        return tcp_engine("prefill", verify=True), tcp_engine("decode", verify=True)

    return make


def routes(engine: Engine) -> set[TransferRoute]:
    return {event.route for event in engine.events if isinstance(event, BlocksSent)}


def sent(pair: tuple[Engine, Engine], epoch: bytes) -> set[TransferRoute]:
    """Send one block whole, and return how it went."""
    prefill, decode = pair
    decode.transport.open(epoch, [3])
    prefill.write(epoch, decode, [(0, 3)])
    prefill.wait_sent(1)
    decode.transport.fence(epoch)
    (fenced,) = decode.wait_for(Fenced)
    assert fenced.checksum == prefill.transport.checksum(epoch)
    assert decode.memory.block(3) == prefill.memory.block(0)
    return routes(prefill)


def test_blocks_go_by_the_carrier_that_both_have(
    pair_over: MakePair, shelf: Shelf, epoch: bytes
) -> None:
    assert sent(pair_over(), epoch) == {TransferRoute("nixl")}
    assert shelf.reads == [0, 1]  # the probe, then the frame


@pytest.mark.parametrize("decode_kind", ["", "ucx"])
def test_a_peer_without_the_carrier_gets_the_blocks_by_tcp_and_it_is_reported(
    pair_over: MakePair, shelf: Shelf, epoch: bytes, decode_kind: str
) -> None:
    note = "not nixl: the peer has not got it"
    assert sent(pair_over("nixl", decode_kind), epoch) == {TransferRoute("tcp", note)}
    assert shelf.num_attached == 0


def test_a_worker_that_asks_for_tcp_sends_by_it_and_nothing_is_amiss(
    pair_over: MakePair, epoch: bytes
) -> None:
    assert sent(pair_over("", "nixl"), epoch) == {TransferRoute("tcp")}


@pytest.mark.parametrize(
    ("amiss", "value", "reason"),
    [
        ("broken", "no device", "nixl does not reach the sender: no device"),
        ("damages", True, "nixl brought other bytes than the sender's"),
    ],
)
def test_a_carrier_that_does_not_bring_its_probe_is_not_used(
    pair_over: MakePair, shelf: Shelf, epoch: bytes, amiss: str, value: object, reason: str
) -> None:
    setattr(shelf, amiss, value)
    assert sent(pair_over(), epoch) == {TransferRoute("tcp", f"not nixl: {reason}")}


def test_a_carrier_that_hangs_is_not_waited_for(
    pair_over: MakePair, shelf: Shelf, epoch: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_inbound, "PROBE_SECONDS", 0.05)
    shelf.flow.clear()
    ((_, note),) = sent(pair_over(), epoch)
    assert note == "not nixl: nixl does not reach the sender: the carrier brought nothing in 0.05 s"


def test_fence_waits_for_no_fetch_and_what_comes_later_lands_in_no_block(
    pair_over: MakePair, shelf: Shelf, epoch: bytes, wait_until: Callable[..., None]
) -> None:
    pair = prefill, decode = pair_over()
    sent(pair, epoch)  # the carrier is attached
    late, before = bytes(16), bytes(decode.memory.block(5))
    shelf.flow.clear()
    decode.transport.open(late, [5])
    prefill.write(late, decode, [(1, 5)])
    wait_until(lambda: len(shelf.reads) == 3)

    decode.transport.fence(late)
    assert decode.wait_for(Fenced, 2)[-1] == Fenced(late, frozenset(), 0)
    other = bytes([1]) * 16
    decode.transport.open(other, [5])  # the block has another owner
    shelf.flow.set()

    assert prefill.wait_for(SendEnded) == [SendEnded(late, "refused: dead epoch")]
    assert decode.memory.block(5) == before


def test_a_fetch_of_a_closed_port_keeps_its_slot_until_it_has_ended(shelf: Shelf) -> None:
    shelf.flow.clear()
    pool = SlotPool(partial(make_slots, ByteMemory()), 1)
    slot = pool.take()
    assert slot is not None
    assert pool.take() is None
    fetch = ShelfFetch(shelf, make_slots(ByteMemory(), 1)[0], 1, slot)

    pool.lose(slot, fetch)
    other = pool.take()

    assert other is not None
    assert other is not slot
    assert pool.take() is None  # it may still be written
    shelf.flow.set()
    assert pool.take() is slot


def test_a_slot_is_waited_for(shelf: Shelf) -> None:
    pool = SlotPool(partial(make_slots, ByteMemory()), 1)
    slot = pool.take()
    assert slot is not None
    threading.Timer(0.01, pool.give_back, [slot]).start()
    assert pool.take(seconds=20.0) is slot


def test_a_frame_without_a_slot_carries_its_payload(
    pair_over: MakePair, epoch: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_over()
    sent(pair, epoch)
    monkeypatch.setattr(SlotPool, "take", lambda *_: None)
    pair[0].events.clear()
    pair[1].events.clear()
    assert sent(pair, bytes([1]) * 16) == {TransferRoute("tcp")}


def test_a_stranger_without_an_open_epoch_makes_no_carrier_do_anything(
    pair_over: MakePair, shelf: Shelf, epoch: bytes
) -> None:
    prefill, decode = pair_over()
    prefill.write(epoch, decode, [(0, 1)])
    assert prefill.wait_for(SendEnded) == [SendEnded(epoch, "refused: dead epoch")]
    assert shelf.num_attached == 0
    assert sent((prefill, decode), bytes([1]) * 16) == {
        TransferRoute("nixl")
    }  # nothing was amiss with it


def test_a_carrier_that_fails_later_ends_the_connection_and_the_next_one_goes_by_tcp(
    pair_over: MakePair, shelf: Shelf, epoch: bytes
) -> None:
    pair = prefill, decode = pair_over()
    sent(pair, epoch)
    shelf.broken = "the device is gone"
    lost = bytes([1]) * 16
    decode.transport.open(lost, [5])
    prefill.write(lost, decode, [(1, 5)])
    (ended,) = prefill.wait_for(SendEnded)
    assert "connection" in ended.reason
    prefill.events.clear()
    decode.events.clear()
    ((transport, note),) = sent(pair, bytes([2]) * 16)
    assert (transport, "the device is gone" in note) == ("tcp", True)


def test_a_carrier_that_brings_its_probe_and_no_frame_is_not_used_again(
    pair_over: MakePair, shelf: Shelf, epoch: bytes
) -> None:
    pair = prefill, decode = pair_over()
    shelf.most_bytes = wire.PROBE_BYTES
    decode.transport.open(epoch, [5])
    prefill.write(epoch, decode, [(1, 5)])
    (ended,) = prefill.wait_for(SendEnded)
    assert "connection" in ended.reason
    prefill.events.clear()
    ((transport, note),) = sent(pair, bytes([1]) * 16)
    assert (transport, note.startswith("not nixl: ")) == ("tcp", True)


@pytest.mark.parametrize("kind", ["nixl", "ucx"])
def test_a_named_transport_that_is_not_installed_is_a_wrong_setting(
    kind: carriers.TransportName, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("no module named that")

    monkeypatch.setattr(carriers, "NixlCarrier", missing)
    monkeypatch.setattr(carriers, "UcxCarrier", missing)
    with pytest.raises(
        ConfigError, match=rf"engine.transport is {kind}.*pdcluster-worker\[{kind}\]"
    ):
        open_carriers(kind, "name", 1 << 20, ByteMemory())


@pytest.mark.parametrize(
    ("has_device", "installed", "requested"),
    [
        (False, {"nixl", "ucx"}, ""),
        (True, {"nixl", "ucx"}, "nixl"),
        (True, {"ucx"}, "ucx"),
        (True, set(), ""),
    ],
)
def test_auto_is_the_best_that_is_there_on_a_machine_with_a_device_for_it(
    monkeypatch: pytest.MonkeyPatch,
    shelf: Shelf,
    has_device: bool,
    installed: set[str],
    requested: str,
) -> None:
    def maker(kind: str) -> Callable[..., ShelfCarrier]:
        def make(*_: object) -> ShelfCarrier:
            if kind not in installed:
                raise ModuleNotFoundError(kind)
            return ShelfCarrier(shelf, ByteMemory(), kind)

        return make

    monkeypatch.setattr(carriers, "has_rdma", lambda: has_device)
    monkeypatch.setattr(carriers, "NixlCarrier", maker("nixl"))
    monkeypatch.setattr(carriers, "UcxCarrier", maker("ucx"))
    assert open_carriers("auto", "name", 1 << 20, ByteMemory()).requested == requested


def test_a_peer_that_was_not_reached_is_tried_again_later() -> None:
    known = Carriers("nixl", {"nixl": ShelfCarrier(Shelf(), ByteMemory())})
    one, other = ("engine", "h:1"), ("engine-2", "h:1")  # started again there
    assert known.offers(one, now=0.0) == ("nixl",)
    known.failed(one, "no route", now=10.0)
    assert known.offers(one, now=10.0 + carriers.RETRY_SECONDS - 1) == ()
    assert known.offers(other, now=10.0) == ("nixl",)
    assert known.offers(one, now=10.0 + carriers.RETRY_SECONDS) == ("nixl",)


def test_ucx_listens_behind_the_kv_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(carriers.os, "environ", environment)
    carriers.keep_ucx_within(0)
    assert environment == {}
    carriers.keep_ucx_within(9100)
    assert environment == {"UCX_TCP_PORT_RANGE": "9164-9291"}
