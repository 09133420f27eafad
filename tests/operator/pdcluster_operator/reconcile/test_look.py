"""The look of a reconcile: what it plans from is what its session says at its end."""

from typing import Any

import pytest

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.discovery.commands import Registered
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_api.schema.pdcluster import PDCluster
from pdcluster_operator.reconcile.etcd_requests import EtcdTarget
from pdcluster_operator.reconcile.etcd_view import EtcdView
from pdcluster_operator.reconcile.look import look
from tests.operator import bodies
from tests.operator.object_cases import minimal
from tests.operator.pdcluster_operator.reconcile.sessions import KEY, Etcd, sessions_with


class GivenEtcd(Etcd):
    """One that may be away."""

    is_away = False

    async def registered(self, target: EtcdTarget) -> Registered:
        if self.is_away:
            raise EtcdUnreachableError("etcd is away")
        return Registered({}, {})


class SlowSecret:
    """A Secret that is read while etcd goes away, and that is noticed."""

    def __init__(self, etcd: GivenEtcd, view: EtcdView, cluster: PDCluster) -> None:
        self._etcd, self._view, self._target = etcd, view, EtcdTarget.of(cluster)

    async def fault(self, namespace: str, name: str | None) -> None:
        self._etcd.is_away = True
        await self._view.fresh(self._target, ())


@pytest.mark.parametrize("is_known", [False, True])
async def test_an_etcd_that_goes_away_during_the_look_is_seen(is_known: bool):
    content = minimal()
    content["spec"]["discovery"] = {"etcd": {"endpoints": ["etcd:2379"]}}
    cluster, etcd = PDCluster.model_validate(content), GivenEtcd()
    session = sessions_with(etcd).of(KEY)
    if is_known:
        await session.etcd.error(EtcdTarget.of(cluster))
    secret: Any = SlowSecret(etcd, session.etcd, cluster)

    found = await look(Live(bodies.cluster(spec=content["spec"]), []), cluster, session, secret)

    standing = session.etcd.standing
    assert standing is not None
    assert (found.observed.discovery.error, standing[0]) == ("etcd is away", "etcd is away")
