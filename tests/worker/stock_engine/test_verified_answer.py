"""Bytes, time and tokens of a verified transfer, by the engine's page before and after it."""

from typing import Any

import pytest
from msgspec.structs import replace

from pdcluster_worker.messages.engine import Fetch, FetchFailed, Received, Tokens
from pdcluster_worker.stock_engine.responses import KvTransferParams, encode_handle
from tests.worker.stock_engine.fake_vllm import METRICS, TRANSFER, Call, end_events, tokens_event
from tests.worker.stock_engine.rig import Rig, rigged, spec

VERIFIED = replace(spec(), verify_transfer=True)
MOVED = {
    "external_prefix_cache_hits_total": 5.0,
    "nixl_bytes_transferred_sum": 3_000_000.0,
    "nixl_xfer_time_seconds_sum": 0.25,
}


def grown(**by: float) -> bytes:
    """The page after these have grown."""
    lines = []
    for line in METRICS.splitlines():
        name = line.removeprefix("vllm:").split("{")[0]
        text, _, value = line.rpartition(" ")
        lines.append(f"{text} {float(value) + by.get(name, 0.0)}" if name in by else line)
    return "\n".join([*lines, ""]).encode()


async def fetched(rig: Rig) -> Call:
    ready = await rig.ready_to_fetch(VERIFIED)
    rig.engine.take(Fetch("r", ready.epoch, encode_handle(KvTransferParams(TRANSFER))))
    return await rig.call()


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (MOVED, Received("r", 5, num_bytes=3_000_000, seconds=0.25)),
        ({"external_prefix_cache_hits_total": 5.0}, Received("r", 5)),
        (MOVED | {"external_prefix_cache_hits_total": 9.0}, Received("r", 5)),
        (
            MOVED
            | {
                "external_prefix_cache_hits_total": 9.0,
                "prompt_tokens_cached_by_source_total": 4.0,
            },
            Received("r", 5, num_bytes=3_000_000, seconds=0.25),
        ),
        ({}, Received("r", 0)),
    ],
    ids=[
        "bytes and time",
        "tokens alone",
        "another request's too",
        "another's from host memory",
        "nothing",
    ],
)
async def test_kv_that_came_is_said_before_the_first_token(
    by: dict[str, float], said: Received
) -> None:
    async with rigged() as rig:
        call = await fetched(rig)
        rig.fake.pages["/metrics"] = grown(**by)
        await call.begin()
        await call.send(tokens_event(7, reason="length") + end_events())
        await call.end()

        assert await rig.said(Received) == said
        assert [token.token_id for token in (await rig.said(Tokens)).tokens] == [7]


@pytest.mark.parametrize("is_before", [True, False])
async def test_a_page_that_is_not_shown_fails_the_fetch(is_before: bool) -> None:
    async with rigged() as rig:
        page = rig.fake.pages.pop("/metrics")
        if is_before:
            ready = await rig.ready_to_fetch(VERIFIED)
            rig.engine.take(Fetch("r", ready.epoch, encode_handle(KvTransferParams(TRANSFER))))
        else:
            rig.fake.pages["/metrics"] = page
            call = await fetched(rig)
            del rig.fake.pages["/metrics"]
            await call.begin()
            await call.send(tokens_event(7))

        failed: Any = await rig.said(FetchFailed)
        assert "does not say what it fetched" in failed.reason
