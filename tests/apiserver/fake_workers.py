"""Workers on loopback that only serve /metrics: a load that a test sets is shared by the ready
workers of each role.
"""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from aiohttp import web

from pdcluster_schema import labels
from tests.apiserver import nodeless
from tests.apiserver.plain_api import Body
from tests.ports import free_port
from tests.worker_pages import WorkerPages

MOST_WORKERS = 6  # of one role
_NETS = {"prefill": 1, "decode": 2, "router": 3}


def address(pod: Body) -> str:
    """The address of a pod: by its role and ordinal."""
    ordinal = int(pod["metadata"]["name"].rpartition("-")[2])
    return f"127.77.{_NETS[pod['metadata']['labels'][labels.ROLE]]}.{ordinal + 1}"


class FakeWorkers:
    """Every worker that a cluster may have, listening.  An async context manager.

    load:    by role, in workers: 1.5 = two workers at 75 %
    num:     workers that share it, by role
    held:    requests that each router holds
    is_well: whether they serve a page at all
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.load = {"prefill": 0.5, "decode": 0.5, "router": 0.0}
        self.num = {"prefill": 1, "decode": 1, "router": 0}
        self.held = 0
        self.is_well = True
        self.pages = WorkerPages()

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        for role, net in _NETS.items():
            app = web.Application()
            app.add_routes([web.get("/metrics", self._handler(role))])
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            self._stack.push_async_callback(runner.cleanup)
            for host in range(1, MOST_WORKERS + 1):
                await web.TCPSite(runner, f"127.77.{net}.{host}", self.port).start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def rule(self, pod: Body) -> Body | None:
        """The status of a pod: ready at its address; of etcd's pods ready alone."""
        if labels.ROLE not in pod["metadata"]["labels"]:
            return nodeless.ready(pod)
        return {**nodeless.ready(pod), "podIP": address(pod), "podIPs": [{"ip": address(pod)}]}

    def _handler(self, role: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def metrics(request: web.Request) -> web.Response:
            if not self.is_well:
                raise web.HTTPServiceUnavailable
            share = min(1.0, self.load[role] / max(1, self.num[role]))
            self.pages.set(
                engine_busy_ratio=share,
                kv_cache_usage_ratio=share if role == "decode" else 0.0,
                held_requests=self.held if role == "router" else 0,
            )
            return web.Response(body=self.pages.text())

        return metrics
