"""Transfers between engines of unequal tensor-parallel sizes: which heads go where, and what whole
blocks see of it.
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.engine.ports import BlocksSent, Fenced, SendEnded, TransferEvent
from pdcluster_worker.kv_transfer.sharded import routes, shares
from tests.worker.kv_transfer.conftest import HEAD_BYTES, NUM_HEADS, rank_memory
from tests.worker.local_transport import LocalFabric, LocalTransport

SIZES = [1, 2, 4]
PAIRS = [(prefill, decode) for prefill in SIZES for decode in SIZES]
EPOCH = bytes(range(16))


class Ranks:
    """An engine of so many ranks: its memories, its transport, and the events so far."""

    def __init__(self, engine_id: str, num_ranks: int, fabric: LocalFabric) -> None:
        self.engine_id = engine_id
        self.addresses = [engine_id] * num_ranks
        self.memories = [rank_memory(heads) for heads in shares(NUM_HEADS, num_ranks)]
        self.transport = LocalTransport(fabric, self.memories, engine_id, verify=True)
        self.events: list[TransferEvent] = []

    def block(self, block_id: int) -> bytes:
        """All heads of a block."""
        return b"".join(memory.block(block_id) for memory in self.memories)

    def poll(self) -> list[TransferEvent]:
        new = self.transport.poll()
        self.events += new
        return new

    def write(self, to: "Ranks", *pairs: tuple[int, int]) -> None:
        self.transport.write(EPOCH, to.engine_id, to.addresses, pairs)


MakePair = Callable[[int, int], tuple[Ranks, Ranks]]


@pytest.fixture
def fabric() -> LocalFabric:
    return LocalFabric(deferred=True)


@pytest.fixture
def pair_of(fabric: LocalFabric) -> MakePair:
    """A prefill and a decode engine of these sizes."""
    return lambda prefill, decode: (Ranks("p", prefill, fabric), Ranks("d", decode, fabric))


@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 3))
def test_every_head_goes_once_from_the_rank_that_has_it_to_the_one_that_takes_it(
    prefill: int, decode: int, more: int
) -> None:
    num_heads = more * 24
    addresses = [f"host:{port}" for port in range(decode)]
    taken = dict(zip(addresses, shares(num_heads, decode), strict=True))

    moved: list[int] = []
    for held in shares(num_heads, prefill):
        for heads, address in routes(held, num_heads, addresses):
            assert set(heads) <= set(held) & set(taken[address])
            moved += heads

    assert sorted(moved) == list(range(num_heads))


@pytest.mark.parametrize("num_ports", [0, 3, 8])
def test_ports_that_cannot_share_the_heads_evenly_end_the_epoch(
    pair_of: MakePair, num_ports: int
) -> None:
    prefill, _ = pair_of(2, 1)
    prefill.transport.write(EPOCH, "d", ["d"] * num_ports, [(0, 0)])

    assert prefill.poll() == [
        SendEnded(EPOCH, f"{num_ports} KV ports cannot share {NUM_HEADS} KV heads evenly")
    ]


@pytest.mark.parametrize(("prefill_size", "decode_size"), PAIRS)
def test_whole_blocks_arrive_in_order_and_checksums_agree(
    pair_of: MakePair, fabric: LocalFabric, prefill_size: int, decode_size: int
) -> None:
    prefill, decode = pair_of(prefill_size, decode_size)
    decode.transport.open(EPOCH, [5, 6, 7])
    prefill.write(decode, (0, 5), (1, 6))
    prefill.write(decode, (2, 7))
    sent: list[int] = []
    while fabric.deliver_next():
        for event in prefill.poll():
            assert isinstance(event, BlocksSent)
            sent += event.block_ids
            assert event.num_bytes == len(event.block_ids) * NUM_HEADS * HEAD_BYTES
    decode.transport.fence(EPOCH)
    (fenced,) = decode.poll()

    assert sent == [0, 1, 2]
    assert isinstance(fenced, Fenced)
    assert (fenced.received, fenced.num_bytes) == ({5, 6, 7}, 3 * NUM_HEADS * HEAD_BYTES)
    assert fenced.checksum == prefill.transport.checksum(EPOCH)
    assert fenced.checksum is not None
    assert [decode.block(block) for block in (5, 6, 7)] == [
        prefill.block(block) for block in (0, 1, 2)
    ]
    prefill.transport.forget(EPOCH)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_block_counts_only_with_all_of_its_heads(
    pair_of: MakePair, fabric: LocalFabric, prefill_size: int, decode_size: int
) -> None:
    prefill, decode = pair_of(prefill_size, decode_size)
    decode.transport.open(EPOCH, [1])
    prefill.write(decode, (0, 1))
    for _ in range(max(prefill_size, decode_size) - 1):
        fabric.deliver_next()
    decode.transport.fence(EPOCH)
    (fenced,) = decode.poll()

    assert isinstance(fenced, Fenced)
    assert (fenced.received, fenced.checksum) == (frozenset(), None)
    assert prefill.poll() == []
    with pytest.raises(ValueError, match="cancel it"):
        prefill.transport.forget(EPOCH)
    fabric.deliver_next()
    assert prefill.poll() + prefill.poll() == [SendEnded(EPOCH, "refused: dead epoch")]


@given(
    st.sampled_from(PAIRS),
    st.lists(st.sampled_from(["deliver", "drop", "cancel", "fence", "poll"]), max_size=30),
)
def test_no_block_is_written_after_its_fence_and_what_counts_is_whole(
    sizes: tuple[int, int], actions: list[str]
) -> None:
    fabric = LocalFabric(deferred=True)
    prefill, decode = Ranks("p", sizes[0], fabric), Ranks("d", sizes[1], fabric)
    targets = [5, 6, 7]
    decode.transport.open(EPOCH, targets)
    prefill.write(decode, *zip([0, 1, 2], targets, strict=True))
    fenced: Fenced | None = None
    at_fence: list[bytes] = []
    for action in [*actions, "fence", *["deliver"] * 12, "poll", "poll", "poll"]:
        match action:
            case "deliver":
                fabric.deliver_next()
            case "drop":
                fabric.drop_next()
            case "cancel":
                prefill.transport.cancel(EPOCH)
            case "fence" if fenced is None:
                decode.transport.fence(EPOCH)
                (event,) = decode.poll()
                assert isinstance(event, Fenced)
                fenced, at_fence = event, [decode.block(block) for block in targets]
            case "poll":
                prefill.poll()
    assert fenced is not None

    assert [decode.block(block) for block in targets] == at_fence
    for source, target in zip([0, 1, 2], targets, strict=True):
        assert target not in fenced.received or prefill.block(source) == decode.block(target)
    sent = [
        block
        for event in prefill.events
        if isinstance(event, BlocksSent)
        for block in event.block_ids
    ]
    assert sent == [0, 1, 2][: len(sent)]
    assert {5 + block for block in sent} <= fenced.received
    ends = [event for event in prefill.events if isinstance(event, SendEnded)]
    assert len(ends) <= 1
    assert ends or len(sent) == 3
