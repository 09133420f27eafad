"""Decode workers that do not know a prefill worker yet are waited for, others are not."""

import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from pdctl.local import known_peers
from pdctl.local.known_peers import prefill_known

PAGES = [
    "# HELP pdcluster_peers known peers by role and state\n",
    'pdcluster_peers{role="decode",state="ready"} 1.0\n',
    'pdcluster_peers{role="prefill",state="connecting"} 1.0\n',
    'pdcluster_peers{role="prefill",state="ready"} 0.0\n',
    'pdcluster_peers{role="prefill",state="ready"} 1.0\n',
]


def state(decode, *roles):
    others = [{"role": role, "http": "127.0.0.1:1"} for role in roles]
    return {"workers": [{"role": "decode", "http": decode}, *others]}


class Decode:
    """A worker whose metrics are the next page at each call; the last one stays."""

    def __init__(self):
        self.pages, self.num_calls, self.address = PAGES, 0, ""

    async def metrics(self, _request):
        self.num_calls += 1
        page = self.pages[min(self.num_calls, len(self.pages)) - 1]
        return web.Response(text=page, status=200 if page else 404)


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    worker, app = Decode(), web.Application()
    app.router.add_get("/metrics", worker.metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    worker.address = "{}:{}".format(*runner.addresses[0][:2])
    yield worker
    await runner.cleanup()


async def test_each_page_is_read_until_a_prefill_worker_is_ready(decode):
    await prefill_known(state(decode.address, "prefill"))

    assert decode.num_calls == len(PAGES)


async def test_without_prefill_workers_none_has_to_be_known(decode):
    await prefill_known(state(decode.address, "mixed"))

    assert decode.num_calls == 0


async def test_a_worker_that_never_knows_one_is_given_up(decode, monkeypatch):
    monkeypatch.setattr(known_peers, "_SECONDS", 0.5)
    decode.pages = PAGES[:3]
    await prefill_known(state(decode.address, "prefill"))

    assert decode.num_calls > 1


async def test_a_worker_without_metrics_is_not_waited_for(decode, monkeypatch):
    decode.pages = [""]
    await prefill_known(state(decode.address, "prefill"))
    assert decode.num_calls == 1

    monkeypatch.setattr(known_peers, "_CALL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        await prefill_known(state(f"127.0.0.1:{silent.getsockname()[1]}", "prefill"))
    await prefill_known(state("127.0.0.1:1", "prefill"))
    await prefill_known(state("", "prefill"))
