"""The look of a reconcile: what it plans from is what its session says at its end."""

from collections.abc import Callable
from typing import Any

import pytest

from pdcluster_api.apiserver.kinds import SERVICE, Kind
from pdcluster_api.apiserver.observe import Live
from pdcluster_api.discovery.commands import Registered
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.reconcile.etcd_requests import EtcdTarget
from pdcluster_operator.reconcile.observation import ParsedClusters, live_cluster, observe_cluster
from pdcluster_schema.pdcluster import PDCluster
from tests.operator import bodies
from tests.operator.pdcluster_operator.reconcile.sessions import KEY, FakeEtcd, sessions_with
from tests.schema.object_cases import minimal


class ExternalEtcd(FakeEtcd):
    """One that may be away."""

    is_away = False

    async def registered(self, target: EtcdTarget) -> Registered:
        if self.is_away:
            raise EtcdUnreachableError("etcd is away")
        return Registered({}, {})


@pytest.mark.parametrize("is_known", [False, True])
async def test_an_etcd_that_goes_away_during_the_look_is_seen(is_known: bool):
    content = minimal()
    content["spec"]["discovery"] = {"etcd": {"endpoints": ["etcd:2379"]}}
    content["spec"]["service"] = {"apiKeySecret": "keys"}
    target, etcd = EtcdTarget.of(PDCluster.model_validate(content)), ExternalEtcd()
    session = sessions_with(etcd).of(KEY)
    if is_known:
        await session.etcd.error(target)

    class SlowClient:
        """etcd goes away, and that is noticed, while the Secret is read."""

        async def find(self, kind: Kind, namespace: str, name: str) -> None:
            etcd.is_away = True
            await session.etcd.fresh(target, ())

    client: Any = SlowClient()
    live = Live(bodies.cluster(spec=content["spec"]), [])
    found = await observe_cluster(client, live, ParsedClusters(), session, change=0, cache=Cache())

    standing = found.inputs.etcd
    assert standing is not None
    assert (found.observed.discovery.error, standing[0]) == ("etcd is away", "etcd is away")


class FindingClient:
    """Finds what it was given; meanwhile: called while it looks."""

    def __init__(self, found: bodies.Body | None, meanwhile: Callable[[], object]) -> None:
        self._found, self._meanwhile = found, meanwhile

    async def find(self, kind: Kind, namespace: str, name: str) -> bodies.Body | None:
        assert (kind, namespace, name) == (SERVICE, bodies.NAMESPACE, "chat")
        self._meanwhile()
        return self._found


def service(version: int) -> bodies.Body:
    return bodies.child("Service", "chat", version, spec={"ports": [version]})


@pytest.mark.parametrize(
    ("found", "event", "left"),
    [(service(3), None, [3]), (None, None, []), (service(3), service(4), [4])],
    ids=["as it was", "gone", "a watch is faster"],
)
async def test_children_that_came_before_their_pdcluster_are_read(
    found: bodies.Body | None, event: bodies.Body | None, left: list[int]
):
    cache = Cache()
    cache.put("Service", service(3))
    cache.put("PDCluster", bodies.cluster())
    client: Any = FindingClient(found, lambda: event and cache.put("Service", event))
    live = await live_cluster(client, cache, KEY)
    assert live is not None
    assert [body["spec"]["ports"][0] for body in live.children] == left
