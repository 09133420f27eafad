"""Waits until decode workers know a prefill worker, whose record reaches them after `pdctl`."""

import asyncio
import re
from contextlib import suppress

import aiohttp

from pdctl.local.verification import State, has_prefill

_SECONDS = 15.0  # then the first prompts are prefilled where they are decoded
_CALL_SECONDS = 2.0
_POLL_SECONDS = 0.1
_KNOWN = re.compile(rb'^pdcluster_peers\{role="prefill",state="ready"\} [1-9]', re.MULTILINE)


async def prefill_known(state: State) -> None:
    """A worker that gives no metrics is not waited for."""
    if not has_prefill(state):
        return
    addresses = [each["http"] for each in state["workers"] if each["role"] == "decode"]
    timeout = aiohttp.ClientTimeout(total=_CALL_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        with suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS):
                await asyncio.gather(*(_known(session, each) for each in addresses if each))


async def _known(session: aiohttp.ClientSession, address: str) -> None:
    with suppress(aiohttp.ClientError, OSError):  # its own TimeoutError too
        while True:
            async with session.get(f"http://{address}/metrics") as response:
                if not response.ok or _KNOWN.search(await response.read()):
                    return
            await asyncio.sleep(_POLL_SECONDS)
