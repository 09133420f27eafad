"""The session of a PDCluster: one for each, gone as a whole, and no task of it outlives the operator's loop."""

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.body import Key
from pdcluster_api.apiserver.observe import Live
from pdcluster_api.discovery.commands import Registered
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.reconcile.autoscaling import Autoscaling, Scaling
from pdcluster_operator.reconcile.etcd_requests import EtcdTarget
from pdcluster_operator.reconcile.etcd_view import EtcdView
from pdcluster_operator.reconcile.metrics import AutoscaleMetrics, LoopMetrics
from pdcluster_operator.reconcile.pod_faults import FailedCreates, PodFaults
from pdcluster_operator.reconcile.reconciler import Reconciler
from pdcluster_operator.reconcile.session import Session, Sessions
from pdcluster_operator.scrape.metrics import ScrapeMetrics
from pdcluster_operator.scrape.scraper import Scraper
from tests.operator.bodies import cluster

KEY, OTHER = Key("default", "chat"), Key("default", "code")
TARGET = EtcdTarget(KEY, ("etcd:2379",))


class Etcd:
    """Answers once it may, and keeps the commands that it is given."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.commands: dict[str, datetime | None] = {"a": datetime(2026, 1, 2, tzinfo=UTC)}

    async def _answer(self) -> None:
        try:
            await self.answers.wait()
        finally:
            await asyncio.sleep(0.01)  # as a connection that is closed

    async def registered(self, target: EtcdTarget) -> Registered:
        await self._answer()
        return Registered({}, dict(self.commands))

    async def command(self, target: EtcdTarget, drain: object, serve: object) -> None:
        self.commands.clear()

    async def remove(self, target: EtcdTarget, records: object) -> list[str]:
        return []


def sessions_with(etcd: Etcd) -> Sessions:
    registry = CollectorRegistry()
    scrapes = ScrapeMetrics(registry, lambda: (), lambda: 0.0)
    scaling = Scaling(Cache(), Scraper(), scrapes, AutoscaleMetrics(registry))
    no_client: Any = None
    events = FailedCreates(no_client)

    def enqueue() -> None:
        pass

    def make(key: Key) -> Session:
        requests: Any = etcd
        return Session(EtcdView(requests, enqueue), PodFaults(events), Autoscaling(key, scaling, enqueue))

    return Sessions(make)


async def test_a_pdcluster_has_one_session_until_it_is_gone():
    sessions = sessions_with(Etcd())
    first = sessions.of(KEY)
    assert sessions.of(KEY) is first
    assert sessions.of(OTHER) is not first
    assert sessions.end(KEY) is first
    assert sessions.end(KEY) is None
    assert list(sessions) == [sessions.of(OTHER)]
    assert sessions.of(KEY) is not first


async def test_the_commands_of_a_pdcluster_that_is_gone_are_removed():
    etcd = Etcd()
    etcd.answers.set()
    sessions = sessions_with(etcd)
    await sessions.of(KEY).etcd.fresh(TARGET, ())
    sessions.end(KEY)
    async with asyncio.timeout(10):
        while etcd.commands:
            await asyncio.sleep(0)


async def test_no_task_of_a_session_outlives_the_loop():
    etcd = Etcd()
    sessions = sessions_with(etcd)
    running = asyncio.create_task(sessions.run())
    await asyncio.sleep(0)
    before = asyncio.all_tasks()
    session = sessions.of(KEY)
    session.etcd.last(TARGET, ())
    await asyncio.sleep(0)
    (begun,) = asyncio.all_tasks() - before
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert begun.cancelled()


async def test_nor_does_one_of_a_session_that_ends_with_the_loop():
    etcd = Etcd()
    sessions = sessions_with(etcd)
    running = asyncio.create_task(sessions.run())
    await asyncio.sleep(0)
    before = asyncio.all_tasks()
    sessions.of(KEY).etcd.last(TARGET, ())
    await asyncio.sleep(0)
    (begun,) = asyncio.all_tasks() - before
    sessions.end(KEY)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert begun.cancelled()


async def test_a_pdcluster_that_was_made_again_under_its_name_has_a_new_session():
    sessions, unused = sessions_with(Etcd()), cast(Any, None)
    metrics = LoopMetrics(CollectorRegistry())
    reconciler = Reconciler(unused, sessions, unused, metrics)
    first = reconciler._session(Live(cluster(), ()))
    first.ready = "True"
    metrics.show_ready(None, "True")
    assert reconciler._session(Live(cluster(), ())) is first
    second = reconciler._session(Live(cluster(uid="another"), ()))
    assert second is not first
    assert (second.uid, list(sessions)) == ("another", [second])
    assert metrics.pdclusters.labels("True")._value.get() == 0
