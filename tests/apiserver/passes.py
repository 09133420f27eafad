"""The reconciler on the real API server, pass by pass as a test asks for them, with no watch that
could help it.
"""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.connection import ApiMetrics, connect
from pdcluster_api.apiserver.kinds import Key
from pdcluster_api.manifests.render import RenderSettings
from pdcluster_operator.controller import Controller, ControllerSettings
from pdcluster_operator.queue.work_queue import Done
from pdcluster_operator.reconcile.session import Session

SITE = RenderSettings("example/worker:1", "example/etcd:1", "default", "cluster.local")
MAX_PASSES = 10


class Passes:
    """loop: filled, and not running: rounds of scrapes and reads of etcd begin with a pass that
    wants them.
    """

    def __init__(self, loop: Controller, key: Key) -> None:
        self.loop, self.key = loop, key

    async def one(self) -> Done:
        """One reconcile of all that the cache holds."""
        return await self.loop._reconciler.reconcile(self.key)

    async def until_written(self) -> list[Done]:
        """Passes as long as one is due at once; returns them all."""
        done = [await self.one()]
        while done[-1].requeue_after_seconds == 0.0:
            assert len(done) < MAX_PASSES, done
            done.append(await self.one())
        return done

    @property
    def session(self) -> Session:
        """Session that the reconciles share."""
        return self.loop._sessions.of(self.key)

    @property
    def uid(self) -> str | None:
        """Uid of the PDCluster that the cache holds."""
        body = self.loop.cache.get("PDCluster", *self.key)
        return None if body is None else body["metadata"]["uid"]


@asynccontextmanager
async def passes_over(
    kubeconfig: Path, namespace: str, name: str = "chat", *, runs: bool = False, **settings: Any
) -> AsyncIterator[Passes]:
    """Passes over one PDCluster, which exists.  runs: the test runs the loop; settings: of the
    loop.
    """
    registry = CollectorRegistry()
    async with ApiClient(await connect(kubeconfig), ApiMetrics(registry)) as client:
        kept = ControllerSettings(SITE, "operator-0", (namespace,), is_in_pod=False, **settings)
        loop = Controller(client, client, kept, registry)
        await loop.fill()
        async with contextlib.AsyncExitStack() as stack:
            if not runs:
                await stack.enter_async_context(loop._scraper)
            try:
                yield Passes(loop, Key(namespace, name))
            finally:
                for session in loop._sessions:
                    session.stop()
