"""Sessions over an etcd that answers when a test lets it."""

import asyncio
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.kinds import Key
from pdcluster_api.discovery.commands import Registered
from pdcluster_api.discovery.verifier import Verifier
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.reconcile.autoscaling import Autoscaling, Scaling
from pdcluster_operator.reconcile.etcd_requests import EtcdTarget
from pdcluster_operator.reconcile.etcd_view import EtcdView
from pdcluster_operator.reconcile.metrics import AutoscaleMetrics
from pdcluster_operator.reconcile.pod_faults import FailedCreates, PodFaults
from pdcluster_operator.reconcile.session import Session, Sessions
from pdcluster_operator.reconcile.verification import VerificationContext, VerificationRunner
from pdcluster_operator.scrape.scraper import ScrapeMetrics, Scraper

KEY, OTHER = Key("default", "chat"), Key("default", "code")


class FakeEtcd:
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

    async def command(
        self, target: EtcdTarget, drain: object, serve: object, roles: object, graces: object = None
    ) -> None:
        self.commands.clear()

    async def remove(self, target: EtcdTarget, records: object) -> list[str]:
        return []


def sessions_with(etcd: FakeEtcd) -> Sessions:
    registry = CollectorRegistry()
    scrapes = ScrapeMetrics(registry, lambda: (), lambda: 0.0)
    scaling = Scaling(Cache(), Scraper(), scrapes, AutoscaleMetrics(registry))
    no_client: Any = None
    events = FailedCreates(no_client)

    def enqueue() -> None:
        pass

    def make(key: Key) -> Session:
        requests: Any = etcd
        return Session(
            EtcdView(requests, enqueue),
            PodFaults(events),
            Autoscaling(key, scaling, enqueue),
            VerificationRunner(VerificationContext(Verifier()), enqueue),
        )

    return Sessions(make)
