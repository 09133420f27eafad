"""Remarks of workers on themselves are on the screen of `pdctl up` and in `pdctl status`."""

import asyncio
from pathlib import Path

from aiohttp import web

from pdctl.cli.status import render_status
from pdctl.local.verification import remarks_of, watch_remarks
from tests.operator.pdctl.run_state import run_state

NOTE = "the model allows 32768, and the KV cache holds 29104"
VERSION = {
    "device": {"kind": "cpu", "model_code": "transformers"},
    "max_model_len": 29104,
    "note": NOTE,
}


async def test_remarks_are_printed_once_and_kept(tmp_path: Path) -> None:
    async def version(_: web.Request) -> web.Response:
        return web.json_response(VERSION)

    app = web.Application()
    app.router.add_get("/version", version)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    said: list[str] = []
    ready = asyncio.Event()
    ready.set()
    run = run_state(tmp_path)
    state = run.read_state() or {}
    state["workers"][1]["http"] = f"127.0.0.1:{runner.addresses[0][1]}"
    run.write_state(state)
    await watch_remarks(run, ready, said.append)
    await runner.cleanup()

    assert said == [
        "decode-0: the model runs by transformers' code, which is slower than the engine's own",
        f"decode-0: at most 29104 tokens a request: {NOTE}",
    ]
    state = (run.read_state() or {}) | run.read_remarks()
    assert render_status(state, "table").splitlines()[-2:] == said


def test_a_worker_without_anything_to_remark_makes_no_line() -> None:
    usual = {"device": {"kind": "cpu", "model_code": "decoder"}, "max_model_len": 8}
    slow = {"device": {"note": "computes with plain torch operations, which are slower: no gcc"}}

    assert remarks_of({"a": usual, "b": {}, "c": {"device": None}}) == []
    assert remarks_of({"a": slow, "b": slow}) == [
        "a, b: computes with plain torch operations, which are slower: no gcc"
    ]
