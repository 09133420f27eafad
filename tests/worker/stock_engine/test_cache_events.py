"""vLLM's KV events as our block events."""

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from pdcluster_worker.messages.block_hash import block_hashes, request_hashes
from pdcluster_worker.messages.engine import BlockEvents
from pdcluster_worker.messages.requests import Image, RequestSpec, SamplingParams
from pdcluster_worker.stock_engine.cache_events import CacheEvents, Subscription
from tests.ports import free_port

SIZE = 4
TOKENS = list(range(100, 116))
OURS = block_hashes(TOKENS, SIZE)
SALT = b"\xab" * 32


def stored(
    hashes: list[int], tokens: list[Any], parent: int | None = None, keys: list[Any] | None = None
) -> dict[str, Any]:
    """As vLLM 0.32 publishes it; fields that we do not read included."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": keys,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([0.5, list(events), 0])


def test_a_chain_over_several_events_has_our_hashes() -> None:
    cache = CacheEvents(SIZE)

    first = cache.take(7, batch(stored([11, 12], TOKENS[:8])))
    second = cache.take(8, batch(stored([13], TOKENS[8:12], parent=12)))

    assert first == BlockEvents(OURS[:2], [], 1)
    assert second == BlockEvents(OURS[2:3], [], 2)
    assert cache.matched(OURS) == 3
    assert len(cache) == 3


def test_pairs_of_tokens_are_their_first_ones() -> None:
    pairs = list(pairwise(TOKENS[:9]))

    assert CacheEvents(SIZE).take(0, batch(stored([11, 12], pairs))) == BlockEvents(OURS[:2], [], 1)


def test_a_removed_block_is_gone_and_unknown_ones_change_nothing() -> None:
    cache = CacheEvents(SIZE)
    cache.take(0, batch(stored([11, 12], TOKENS[:8])))

    assert cache.take(1, batch(removed(12, 99))) == BlockEvents([], OURS[1:2], 2)
    assert cache.take(2, batch(removed(98))) is None
    assert cache.matched(OURS) == 1


def test_offloaded_blocks_without_tokens_are_not_indexed() -> None:
    """As vLLM's OffloadingConnector publishes them by default."""
    cache = CacheEvents(SIZE)
    cache.take(0, batch(stored([11], TOKENS[:4])))
    offloaded = stored([11], []) | {"block_size": 0, "medium": "CPU", "kv_cache_spec_kind": None}

    assert cache.take(1, batch(offloaded)) is None
    assert cache.take(2, batch(removed(11))) == BlockEvents([], OURS[:1], 2)
    assert cache.take(3, batch(stored([12], TOKENS[4:8], parent=11))) is None
    assert cache.take(4, batch(removed(11) | {"medium": "CPU"})) is None


def test_equal_tokens_under_two_hashes_of_theirs_are_one_block_of_ours() -> None:
    cache = CacheEvents(SIZE)
    cache.take(0, batch(stored([11], TOKENS[:4]), stored([21], TOKENS[:4])))

    assert cache.take(1, batch(removed(11))) is None
    assert cache.take(2, batch(removed(21))) == BlockEvents([], OURS[:1], 2)


def test_our_salt_comes_back_from_the_first_block() -> None:
    cache = CacheEvents(SIZE)

    events = cache.take(0, batch(stored([11, 12], TOKENS[:8], keys=[[SALT.hex()], None])))
    more = cache.take(1, batch(stored([13], TOKENS[8:12], parent=12)))

    salted = block_hashes(TOKENS, SIZE, SALT)
    assert events is not None
    assert more is not None
    assert events.stored == salted[:2]
    assert more.stored == salted[2:3]


def test_blocks_of_an_adapter_are_those_of_its_salt() -> None:
    cache = CacheEvents(SIZE)
    keys = [["sql", SALT.hex()], ["sql"]]
    event = {**stored([11, 12], TOKENS[:8], keys=keys), "lora_name": "sql"}
    later = {**stored([13], TOKENS[8:12], parent=12, keys=[["sql"]]), "lora_name": "sql"}

    cache.take(0, batch(event, later))

    assert cache.matched(block_hashes(TOKENS, SIZE, SALT)) == 3
    assert cache.matched(OURS) == 0


def test_blocks_with_an_image_are_those_of_that_image_alone() -> None:
    cache = CacheEvents(SIZE)
    keys = [[["red", 2]], [["red", -2]], None]
    cache.take(0, batch(stored([11, 12, 13], TOKENS[:12], keys=keys)))

    def matched(*images: Image) -> int:
        sampling = SamplingParams(max_tokens=1, seed=0)
        spec = RequestSpec("r", TOKENS[:12], sampling, images=list(images))
        return cache.matched(request_hashes(spec, SIZE))

    assert matched(Image(2, 4, "red", "")) == 3
    assert [matched(), matched(Image(2, 4, "blue", "")), matched(Image(3, 3, "red", ""))] == [0] * 3


@pytest.mark.parametrize(
    "event",
    [
        {**stored([11], TOKENS[:4], keys=[["sql"]]), "lora_name": "sql"},
        stored([11], TOKENS[:4], parent=99),
        stored([11], TOKENS[:4], keys=[["a lora"]]),
        stored([11], TOKENS[:4], keys=[[SALT.hex(), "more"]]),
        {**stored([11], TOKENS[:4]), "block_size": 6},
        {**stored([11], TOKENS[:4]), "kv_cache_spec_kind": "sliding_window"},
        stored([11], TOKENS[:8]),  # a group that keeps the last block of two
    ],
)
def test_what_no_request_of_ours_can_hit_is_left_out(event: dict[str, Any]) -> None:
    cache = CacheEvents(SIZE)

    assert cache.take(0, batch(event, stored([12], TOKENS[4:8], parent=11))) is None
    assert len(cache) == 0


def of_group(event: dict[str, Any], group: int, kind: str) -> dict[str, Any]:
    return {**event, "group_idx": group, "kv_cache_spec_kind": kind}


def test_full_attention_decides_where_a_model_has_several_groups() -> None:
    cache = CacheEvents(SIZE)

    events = cache.take(
        0,
        batch(
            of_group(stored([12], TOKENS[:8]), 0, "sliding_window"),  # first layer of gpt-oss
            of_group(stored([11, 12], TOKENS[:8]), 1, "full_attention"),
            of_group(stored([11, 12], TOKENS[:8]), 2, "full_attention"),
            of_group(stored([12], TOKENS[:8]), 3, "mamba"),
        ),
    )

    assert events == BlockEvents(OURS[:2], [], 1)
    # a window that has passed takes nothing away, nor does a second group
    gone = [{**removed(11, 12), "group_idx": group} for group in (0, 2, 3)]
    assert cache.take(1, batch(*gone)) is None
    assert cache.matched(OURS) == 2
    gone = [{**removed(12), "group_idx": 1}]
    assert cache.take(2, batch(*gone)) == BlockEvents([], OURS[1:2], 2)


@pytest.mark.parametrize("kind", ["mla_attention", "sink_full_attention", None])
def test_other_full_attention_is_followed_too(kind: str | None) -> None:
    cache = CacheEvents(SIZE)

    cache.take(0, batch({**stored([11], TOKENS[:4]), "group_idx": 2, "kv_cache_spec_kind": kind}))

    assert cache.matched(OURS) == 1


def test_a_block_of_a_larger_group_is_several_of_ours() -> None:
    cache = CacheEvents(SIZE)
    first = {**stored([11], TOKENS[:8]), "block_size": 2 * SIZE}
    second = {**stored([12], TOKENS[8:16], parent=11), "block_size": 2 * SIZE}

    assert cache.take(0, batch(first, second)) == BlockEvents(OURS, [], 1)
    assert cache.take(1, batch(removed(12))) == BlockEvents([], OURS[2:], 2)


def test_an_offloaded_block_is_cached_until_it_is_gone_there_too() -> None:
    cache = CacheEvents(SIZE)
    on_cpu = {"medium": "CPU"}
    cache.take(0, batch(stored([11], TOKENS[:4]), {**stored([11], TOKENS[:4]), **on_cpu}))

    assert cache.take(1, batch(removed(11))) is None
    more = {**stored([12], TOKENS[4:8], parent=11), **on_cpu}
    assert cache.take(2, batch(more)) == BlockEvents(OURS[1:2], [], 2)
    assert cache.take(3, batch({**removed(11), **on_cpu})) == BlockEvents([], OURS[:1], 3)


def test_a_gap_forgets_all_and_says_so() -> None:
    cache = CacheEvents(SIZE)
    cache.take(0, batch(stored([11], TOKENS[:4])))

    events = cache.take(2, batch(stored([31], [1, 2, 3, 4]), stored([12], TOKENS[4:8], parent=11)))

    assert events == BlockEvents(block_hashes([1, 2, 3, 4], SIZE), [], 2, is_cleared=True)


def test_a_cleared_cache_is_reported_whole() -> None:
    cache = CacheEvents(SIZE)
    cache.take(0, batch(stored([11], TOKENS[:4])))

    assert cache.take(1, batch({"type": "AllBlocksCleared"})) == BlockEvents(
        [], [], 2, is_cleared=True
    )


def test_a_snapshot_is_the_whole_cache() -> None:
    cache = CacheEvents(SIZE)
    cache.take(0, batch(stored([11, 12], TOKENS[:8])))

    assert cache.snapshot() == BlockEvents(OURS[:2], [], 2, is_cleared=True)


@pytest.mark.processes
async def test_events_come_to_an_address_and_messages_of_another_form_are_ignored(caplog) -> None:
    taken = asyncio.Queue[tuple[int, bytes]]()
    port = free_port()
    subscription = Subscription("127.0.0.2", port, lambda *batch: taken.put_nowait(batch))
    subscription.open()
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    publisher.connect(f"tcp://127.0.0.2:{port}")
    try:
        while taken.empty():  # until it is connected
            await publisher.send_multipart([b"", b"x"])
            await publisher.send_multipart([b"", (7).to_bytes(8, "big"), b"y"])
            await asyncio.sleep(0.05)
        assert await taken.get() == (7, b"y")
    finally:
        publisher.close(linger=0)
        context.destroy(linger=0)
        subscription.close()
    assert "ignored KV events of 2 frames in place of 3" in caplog.text
