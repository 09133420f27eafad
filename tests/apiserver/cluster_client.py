"""The operator's client on the real API server, and a PDCluster that owns what a test makes."""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.client import ApiClient, ClientLimits
from pdcluster_api.apiserver.connection import ApiMetrics, connect
from pdcluster_api.apiserver.kinds import CHILDREN, PDCLUSTER, Kind
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_operator.writes.actions import Action, ObjectName
from pdcluster_operator.writes.apply import apply
from tests.apiserver import cluster_objects as objects
from tests.operator.differences import diff

Body = dict[str, Any]


class Connection:
    """A client and its metrics."""

    def __init__(self, client: ApiClient, registry: CollectorRegistry) -> None:
        self.client, self._registry = client, registry

    def calls(self, *verbs: str) -> float:
        """Requests of these verbs that were sent."""
        return sum(count for labels, count in self._counts() if labels["verb"] in verbs)

    @property
    def unanswered(self) -> float:
        """Requests that got no answer."""
        return sum(count for labels, count in self._counts() if labels["code"] == "0")

    @property
    def writes(self) -> float:
        """Requests that may change something."""
        return self.calls("apply", "create", "patch", "update", "delete")

    def _counts(self) -> Iterator[tuple[dict[str, str], float]]:
        for metric in self._registry.collect():
            for sample in metric.samples:
                if sample.name == "pdcluster_operator_api_calls_total":
                    yield sample.labels, sample.value

    async def owner(self, namespace: str) -> Body:
        """A PDCluster in the namespace."""
        roles = {
            role: {"pools": [{"name": "cpu", "replicas": 1}]} for role in ("prefill", "decode")
        }
        spec = {"model": {"name": "tiny", "path": "/models/tiny"}, "roles": roles}
        metadata = {"name": objects.NAME, "namespace": namespace}
        return await self.client.create(
            PDCLUSTER,
            {
                "apiVersion": PDCLUSTER.api_version,
                "kind": PDCLUSTER.name,
                "metadata": metadata,
                "spec": spec,
            },
        )

    async def live(self, namespace: str) -> list[Body]:
        """Every object of a child's kind in the namespace, ours or not."""
        kinds = [kind for kind in CHILDREN if not kind.is_optional]
        return [body for kind in kinds async for body in self.client.list(kind, namespace)]

    async def actions(
        self, owner: Body, desired: Iterable[Body], *, rewrite: Iterable[ObjectName] = ()
    ) -> list[Action]:
        """Actions that diff decides on now."""
        live = await self.live(owner["metadata"]["namespace"])
        return diff(owner["metadata"]["uid"], list(desired), live, rewrite=tuple(rewrite))

    async def converge(
        self, owner: Body, desired: Iterable[Body], *, rewrite: Iterable[ObjectName] = ()
    ) -> list[WriteFailure]:
        """Do what diff says now."""
        return await apply(self.client, await self.actions(owner, desired, rewrite=rewrite))

    async def converge_knowing(
        self, owner: Body, desired: Iterable[Body], live: Iterable[Body]
    ) -> list[WriteFailure]:
        """Do what diff says of these live objects, which may be out of date."""
        return await apply(self.client, diff(owner["metadata"]["uid"], list(desired), live))

    async def get(self, kind: Kind, namespace: str, name: str) -> Body:
        """One object."""
        return await self.client.get(kind, namespace, name)


@asynccontextmanager
async def connected(
    kubeconfig: Path, limits: ClientLimits | None = None
) -> AsyncIterator[Connection]:
    """A connection for one test."""
    registry = CollectorRegistry()
    async with ApiClient(await connect(kubeconfig), ApiMetrics(registry), limits) as client:
        yield Connection(client, registry)
