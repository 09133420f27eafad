"""NIXL's slots on the device that has the blocks: there or in host memory at either side.

The device is the CPU, and NIXL is the real one: it takes our kind of device memory for that of the
host, where the tests say so, since without a GPU it registers none.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdcluster_worker.engine.ports import BlocksSent, Fenced, TransferRoute
from pdcluster_worker.kv_transfer import nixl_carrier
from pdcluster_worker.kv_transfer.nixl_carrier import NixlCarrier
from pdcluster_worker.model.kv_cache import DeviceKVCache, DeviceSlots
from tests.transports import need_transport
from tests.worker.kv_transfer.conftest import ByteMemory, Engine, device_cache

GPU = 3
FRAME_BYTES = 1 << 16

Memory = ByteMemory | DeviceKVCache
MakeEngine = Callable[..., Engine]


class GpuCache:
    """A device cache whose slots say that they are on a GPU."""

    def __init__(self) -> None:
        self._cache = device_cache()
        self.slots_made: list[DeviceSlots] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def slots(self, num_bytes: int) -> DeviceSlots:
        slots = self._cache.slots(num_bytes)
        slots.device = GPU
        self.slots_made.append(slots)
        return slots


class FullGpuCache(GpuCache):
    def slots(self, num_bytes: int) -> DeviceSlots:
        raise RuntimeError("out of memory")


@pytest.fixture(autouse=True)
def _nixl() -> None:
    need_transport("nixl")


@pytest.fixture
def gpu_is_host(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Have NIXL take memory of a GPU for that of the host; returns what is described to it."""
    real, described = nixl_carrier.bindings(), list[tuple[Any, Any]]()

    def noted(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_list(kind: Any, parts: list[tuple[Any, ...]]) -> Any:
            described.append((kind, parts[0][2]))
            return make(real.DRAM_SEG, parts)

        return make_list

    names = {name: getattr(real, name) for name in dir(real) if not name.startswith("__")}
    lists = {name: noted(names[name]) for name in ("nixlRegDList", "nixlXferDList")}
    monkeypatch.setattr(nixl_carrier, "bindings", lambda: SimpleNamespace(**(names | lists)))
    return described


def moved(make: MakeEngine, source: Any, target: Any, epoch: bytes) -> set[TransferRoute]:
    """Move blocks from one memory to another, with checksums, and return how they went."""
    prefill = make("prefill", memory=source, transport="nixl", verify=True)
    decode = make("decode", memory=target, transport="nixl", verify=True)
    decode.transport.open(epoch, [3, 1])
    prefill.write(epoch, decode, [(0, 3), (5, 1)])
    prefill.wait_sent(2)
    decode.transport.fence(epoch)
    (fenced,) = decode.wait_for(Fenced)
    assert fenced.checksum == prefill.transport.checksum(epoch) is not None
    assert target.block(3) == source.block(0)
    assert target.block(1) == source.block(5)
    return {event.route for event in prefill.events if isinstance(event, BlocksSent)}


@pytest.mark.parametrize(
    ("source", "target"),
    [(device_cache, ByteMemory), (ByteMemory, device_cache), (device_cache, device_cache)],
)
def test_blocks_of_a_device_go_to_a_device_or_the_host_and_through_no_host_copy(
    tcp_engine: MakeEngine,
    epoch: bytes,
    monkeypatch: pytest.MonkeyPatch,
    source: Callable[[], Memory],
    target: Callable[[], Memory],
) -> None:
    landed: list[int] = []
    monkeypatch.setattr(DeviceKVCache, "write_block", lambda *_: landed.append(1))
    assert moved(tcp_engine, source(), target(), epoch) == {TransferRoute("nixl")}
    assert landed == []


@pytest.mark.parametrize(
    ("source", "target"), [(GpuCache, GpuCache), (GpuCache, ByteMemory), (ByteMemory, GpuCache)]
)
def test_each_side_of_a_read_is_described_as_memory_of_its_kind(
    tcp_engine: MakeEngine,
    epoch: bytes,
    gpu_is_host: list[tuple[Any, Any]],
    source: Callable[[], Any],
    target: Callable[[], Any],
) -> None:
    assert moved(tcp_engine, source(), target(), epoch) == {TransferRoute("nixl")}

    nixl = nixl_carrier.bindings()
    kinds = {GpuCache: (nixl.VRAM_SEG, GPU), ByteMemory: (nixl.DRAM_SEG, 0)}
    assert gpu_is_host[-2:] == [kinds[target], kinds[source]]  # here and there, of the last read
    assert gpu_is_host[:2] == [kinds[source]] * 2  # registered, and given away


def test_memory_of_a_gpu_that_nixl_does_not_register_goes_through_the_host_and_it_is_reported(
    tcp_engine: MakeEngine, epoch: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    source = GpuCache()
    assert moved(tcp_engine, source, GpuCache(), epoch) == {TransferRoute("nixl")}
    assert source.slots_made
    assert "NIXL has no slots on the device: NIXL_ERR_BACKEND" in caplog.text


def test_a_gpu_without_room_for_slots_has_them_in_the_host(
    tcp_engine: MakeEngine, epoch: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert moved(tcp_engine, FullGpuCache(), device_cache(), epoch) == {TransferRoute("nixl")}
    assert "NIXL has no slots on the device: out of memory" in caplog.text


@pytest.mark.parametrize("device", [GPU, -1, 1 << 63])
def test_a_pair_that_cannot_move_memory_of_a_gpu_goes_by_tcp_and_says_why(
    tcp_engine: MakeEngine, epoch: bytes, monkeypatch: pytest.MonkeyPatch, device: int
) -> None:
    """The sender names a device that the receiver cannot read: its probe does not come."""
    outgoing = NixlCarrier.outgoing

    def of_a_gpu(carrier: NixlCarrier) -> Any:
        side = outgoing(carrier)
        name, known, *_ = msgspec.msgpack.decode(side.blob)
        side.blob = msgspec.msgpack.encode([name, known, device])
        return side

    monkeypatch.setattr(NixlCarrier, "outgoing", of_a_gpu)
    ((transport, note),) = moved(tcp_engine, device_cache(), device_cache(), epoch)
    assert transport == "tcp"
    assert note.startswith("not nixl: nixl does not reach the sender: NIXL cannot read: ")


@pytest.mark.parametrize("said", [None, "off"])
def test_a_gpu_is_read_by_cuda_ipc_also_without_nvlink_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    name = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    monkeypatch.setenv(name, said or "")
    if said is None:
        monkeypatch.delenv(name)
    NixlCarrier("host", FRAME_BYTES, ByteMemory())
    assert os.environ.get(name) == said
    gpu: Any = GpuCache()
    NixlCarrier("gpu", FRAME_BYTES, gpu)
    assert os.environ[name] == (said or "on")


def test_an_older_reader_understands_a_carrier_in_host_memory_and_refuses_one_on_a_gpu(
    gpu_is_host: list[tuple[Any, Any]],
) -> None:
    older = msgspec.msgpack.Decoder(tuple[str, bytes])
    host = NixlCarrier("host", FRAME_BYTES, ByteMemory())
    assert older.decode(host.outgoing().blob)[0] == "host"
    gpu: Any = GpuCache()
    with pytest.raises(msgspec.ValidationError):
        older.decode(NixlCarrier("gpu", FRAME_BYTES, gpu).outgoing().blob)
