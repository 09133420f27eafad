"""The session of a PDCluster: one for each, gone as a whole, and no task of it outlives the
operator's loop.
"""

import asyncio
from typing import Any, cast

from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.observe import Live
from pdcluster_operator.reconcile.etcd_requests import EtcdTarget
from pdcluster_operator.reconcile.metrics import ControllerMetrics
from pdcluster_operator.reconcile.reconciler import Reconciler
from tests.operator.bodies import cluster
from tests.operator.pdcluster_operator.reconcile.sessions import KEY, OTHER, FakeEtcd, sessions_with

TARGET = EtcdTarget(KEY, ("etcd:2379",))


async def test_a_pdcluster_has_one_session_until_it_is_gone():
    sessions = sessions_with(FakeEtcd())
    first = sessions.of(KEY)
    assert sessions.of(KEY) is first
    assert sessions.of(OTHER) is not first
    assert sessions.end(KEY) is first
    assert sessions.end(KEY) is None
    assert list(sessions) == [sessions.of(OTHER)]
    assert sessions.of(KEY) is not first


async def test_the_commands_of_a_pdcluster_that_is_gone_are_removed():
    etcd = FakeEtcd()
    etcd.answers.set()
    sessions = sessions_with(etcd)
    await sessions.of(KEY).etcd.fresh(TARGET, ())
    sessions.end(KEY)
    async with asyncio.timeout(10):
        while etcd.commands:
            await asyncio.sleep(0)


async def test_no_task_of_a_session_outlives_the_loop():
    etcd = FakeEtcd()
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
    etcd = FakeEtcd()
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
    sessions, unused = sessions_with(FakeEtcd()), cast(Any, None)
    metrics = ControllerMetrics(CollectorRegistry())
    reconciler = Reconciler(unused, sessions, unused, metrics, unused)
    first = reconciler._session(Live(cluster(), ()))
    first.ready = "True"
    metrics.show_ready(None, "True")
    assert reconciler._session(Live(cluster(), ())) is first
    second = reconciler._session(Live(cluster(uid="another"), ()))
    assert second is not first
    assert (second.uid, list(sessions)) == ("another", [second])
    assert metrics.pdclusters.labels("True")._value.get() == 0
