"""Limitations that workers report at /version, such as a slower model path.

`pdctl up` prints them once; `pdctl status` reads them from the run's folder.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import aiohttp

from pdctl.local.run_directory import RunDirectory

_SECONDS = 10.0


async def watch_remarks(
    run: RunDirectory, ready: asyncio.Event, echo: Callable[[str], None]
) -> None:
    await ready.wait()
    state = run.read_state() or {"workers": ()}
    addresses = {worker["name"]: worker["http"] for worker in state["workers"] if worker["http"]}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS)) as session:
        found = await asyncio.gather(*(_version(session, each) for each in addresses.values()))
    remarks = remarks_of(dict(zip(addresses, found, strict=True)))
    run.write_remarks(remarks)
    for remark in remarks:
        echo(remark)


async def _version(session: aiohttp.ClientSession, address: str) -> Mapping[str, Any]:
    """Empty where the worker gives none."""
    try:
        async with session.get(f"http://{address}/version") as response:
            body = json.loads(await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def remarks_of(versions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each remark, with its workers.

    >>> slow = {"device": {"model_code": "transformers"}}
    >>> remarks_of({"a": slow, "b": slow, "c": {"max_model_len": 9, "note": "no room"}})[0]
    "a, b: the model runs by transformers' code, which is slower than the engine's own"
    """
    makers: dict[str, list[str]] = {}
    for name, version in versions.items():
        for remark in _remarks(version):
            makers.setdefault(remark, []).append(name)
    return [f"{', '.join(names)}: {remark}" for remark, names in makers.items()]


def _remarks(version: Mapping[str, Any]) -> Iterator[str]:
    device = version.get("device") or {}
    if device.get("model_code") == "transformers":
        yield "the model runs by transformers' code, which is slower than the engine's own"
    if device.get("note"):
        yield str(device["note"])
    if version.get("note"):
        yield f"at most {version.get('max_model_len')} tokens a request: {version['note']}"
