"""Acting on a plan: a reconcile that had nothing to write is not one after which
nothing can come.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.manifests.render import Owner, RenderSettings
from pdcluster_api.plan.observed.state import DiscoveryState, Observed, WriteFailure
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.reconcile import apply_plan
from pdcluster_operator.reconcile.apply_plan import ApplyResult, PlanApplier, TlsStep
from pdcluster_operator.reconcile.etcd_requests import EtcdTarget
from pdcluster_operator.reconcile.observation import Observation
from pdcluster_operator.reconcile.session import Fingerprint, ObservedInputs, Session
from pdcluster_operator.writes.actions import ObjectName
from pdcluster_schema.load import parse
from tests.operator.bodies import child, cluster
from tests.operator.pdcluster_api.plan.clusters import NOW as STAMP
from tests.operator.pdcluster_api.plan.clusters import plan_all
from tests.operator.pdcluster_operator.reconcile.sessions import KEY, FakeEtcd, sessions_with

NOW = datetime(2026, 1, 2, tzinfo=UTC)
OWNER = Owner("chat", "default", "uid")
SITE = RenderSettings("example/worker:1", "example/etcd:1", "default", "cluster.local")
INPUTS = ObservedInputs(0, None, {}, None)
POOLS = {"pools": [{"name": "cpu", "replicas": 1}]}
SPEC = {
    "model": {"name": "tiny", "path": "/models/tiny"},
    "roles": {"prefill": POOLS, "decode": POOLS},
    "discovery": {"etcd": {"endpoints": ["etcd:2379"], "tlsSecret": "etcd-client"}},
}


class EtcdSecret:
    """has_client_certificate: as `EtcdRequests` says it; None = the Secret cannot be used."""

    def __init__(self, answer: bool | None) -> None:
        self.answer = answer

    async def has_client_certificate(self, target: object) -> bool | None:
        return self.answer


async def acted_on(
    session: Session, secret: EtcdSecret, children: Sequence[dict[str, Any]] = ()
) -> ApplyResult:
    """Act on a new PDCluster for whose shared objects there is nothing to write."""
    made = parse(
        {
            "apiVersion": "pdcluster.io/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "chat"},
            "spec": SPEC,
        }
    )
    live = Live(cluster(), children)
    observed = Observed(generation=1, status={}, discovery=DiscoveryState(managed=False))
    unused: Any = None
    etcd: Any = secret
    applier = PlanApplier(unused, Cache(), SITE, etcd, lambda: NOW)
    return await applier.apply(
        Observation(live, OWNER, made, observed, INPUTS, EtcdTarget.of(made), None),
        plan_all(made, observed, STAMP).plan,
        session,
    )


@pytest.mark.parametrize("answer", [True, None])
async def test_a_snapshot_that_waits_for_the_etcds_secret_is_tried_again(
    answer: bool | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(apply_plan, "tls_step", lambda *_: TlsStep(requeue_after_seconds=1e6))
    monkeypatch.setattr(apply_plan, "compare", lambda *_, **__: [])
    session = sessions_with(FakeEtcd()).of(KEY)
    acted = await acted_on(session, EtcdSecret(answer))
    assert (acted.wrote, acted.failures) == (False, ())
    assert (session.fingerprint is None) == (answer is None)


@pytest.mark.parametrize("hours", [-1.0, 1.0])
async def test_every_child_is_compared_again_when_a_fingerprint_has_ended(
    hours: float, monkeypatch: pytest.MonkeyPatch
):
    """Also those whose object and version have not changed since they were found to be right."""
    monkeypatch.setattr(apply_plan, "tls_step", lambda *_: TlsStep(requeue_after_seconds=1e6))
    monkeypatch.setattr(apply_plan, "compare", lambda *_, **__: [])
    session = sessions_with(FakeEtcd()).of(KEY)
    session.settled[ObjectName("Service", "chat")] = b"as it was"
    session.fingerprint = Fingerprint(b"others", NOW + timedelta(hours=hours), is_due=False)
    await acted_on(session, EtcdSecret(True))
    assert bool(session.settled) is (hours > 0)


@pytest.mark.parametrize(
    ("reason", "names"),
    [("ApplyFailed", "; kube-vip set fields of it, which may exclude ours"), ("Forbidden", "")],
    ids=["refused", "no right"],
)
async def test_a_refused_apply_names_the_other_managers_of_the_object(
    reason: str, names: str, monkeypatch: pytest.MonkeyPatch
):
    rival = {
        "manager": "kube-vip",
        "operation": "Update",
        "fieldsV1": {"f:spec": {"f:sessionAffinity": {}}},
    }
    refusals = [WriteFailure(f"Service {name}", reason, "no") for name in ("chat", "chat-workers")]

    async def refuse(*_: object) -> list[WriteFailure]:
        return refusals

    monkeypatch.setattr(apply_plan, "tls_step", lambda *_: TlsStep(requeue_after_seconds=1e6))
    monkeypatch.setattr(apply_plan, "compare", lambda *_, **__: [])
    monkeypatch.setattr(apply_plan, "apply", refuse)
    children = [
        child("Service", "chat", metadata={"managedFields": [rival]}),
        child("Service", "chat-workers"),
    ]
    acted = await acted_on(sessions_with(FakeEtcd()).of(KEY), EtcdSecret(True), children)
    assert [failure.message for failure in acted.failures] == [f"no{names}", "no"]
