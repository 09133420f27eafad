"""A relaying router on real sockets (`rig`); nothing of it is faked but workers and application."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import AdmissionSpec
from pdcluster_schema.routing import RelayingSpec
from pdcluster_schema.service import HttpLimitsSpec
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.proxy.client_connection import proxy_protocol
from pdcluster_worker.proxy.picker import UpstreamState
from pdcluster_worker.proxy.reverse_proxy import ReverseProxy
from pdcluster_worker.server.http.limits import limits_of
from pdcluster_worker.server.http.run import serve
from tests.worker.proxy.rig import FakeWorker, Rig

KEY = "k"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A router with two workers, key `k` valid."""
    workers = [FakeWorker("a"), FakeWorker("b")]
    for worker in workers:
        await worker.start()
    metrics, found = Metrics(), []
    policy = PolicyConfig(
        relaying=RelayingSpec(enabled=True, policy="roundRobin"),
        admission=AdmissionSpec(max_body_bytes=1 << 20),
        http_limits=HttpLimitsSpec(max_header_bytes=4096, max_headers=16),
    )

    async def own(scope, receive, send):
        message = await receive()
        rig.own.append((scope["method"], scope["path"], message.get("body", b"")))
        body = json.dumps({"own": scope["path"]}).encode()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    def policy_now() -> PolicyConfig:
        return found[0].policy if found else policy

    relay = ReverseProxy(
        policy_now, lambda key: "t" if key == KEY else None, lambda: rig.is_draining, metrics
    )
    http = await serve(
        own,
        "127.0.0.1",
        0,
        lambda: limits_of(policy_now().http_limits),
        lambda ordinary: proxy_protocol(relay, ordinary),
    )
    rig = Rig(relay, http, metrics, workers, policy=policy)
    found.append(rig)
    rig.standing = {
        worker.name: UpstreamState(worker.name, worker.name, f"127.0.0.1:{worker.port}", True, 0)
        for worker in workers
    }
    relay.workers = lambda: list(rig.standing.values())
    relay.poll()
    running = asyncio.create_task(relay.run())
    yield rig
    running.cancel()
    for client in rig.clients:
        client.writer.close()
    await http.close()
    relay.close()
    for worker in workers:
        await worker.stop()
