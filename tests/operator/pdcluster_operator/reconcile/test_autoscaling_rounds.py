"""Rounds of scrapes over real HTTP: the workers scraped, the times, and one decision per round."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.kinds import Key
from pdcluster_api.apiserver.observe import Live, observe
from pdcluster_api.plan.gates import Gate, gate_field
from pdcluster_api.plan.observed.state import Observed
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.reconcile import autoscaling
from pdcluster_operator.reconcile.autoscaling import Autoscaling, Scaling
from pdcluster_operator.reconcile.metrics import AutoscaleMetrics
from pdcluster_operator.scrape.scraper import ScrapeMetrics, Scraper
from pdcluster_operator.scrape.windows import Windows
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.labels import REVISION, workload_labels
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.rollout import RolloutSpec
from pdcluster_schema.workload import WorkloadId
from tests.operator.bodies import NAME, NAMESPACE, child, cluster
from tests.operator.pdcluster_api.plan.clusters import ETCD_READY, make_cluster
from tests.operator.pdcluster_operator.scrape.worker_servers import WorkerServer, http, serves
from tests.operator.pods import worker_body
from tests.worker_pages import WorkerPages

KEY = Key(NAMESPACE, NAME)
NOW = datetime(2026, 1, 2, tzinfo=UTC)
DEADLINE_SECONDS = 20.0
# less than an object may ask for
ON = AutoscaleSpec(mode="On").model_copy(update={"interval_seconds": 1})


def worked_by(autoscale: AutoscaleSpec) -> PDCluster:
    made = make_cluster()
    return made.model_copy(update={"spec": made.spec.model_copy(update={"autoscale": autoscale})})


WORKED = worked_by(ON)
# one round, and no second one while a test looks
ONE_ROUND = worked_by(AutoscaleSpec.model_validate({"mode": "On", "intervalSeconds": 3600}))


def worker(
    role: str, revision: str, ordinal: int = 0, *, ready: bool = True, **metadata: Any
) -> dict[str, Any]:
    """A pod of a worker, at loopback."""
    identity = WorkloadId(NAME, role, "cpu", revision)
    conditions = [{"type": "Ready", "status": str(ready)}]
    status = {"podIP": "127.0.0.1", "conditions": conditions}
    return worker_body(identity, ordinal, status=status, **metadata)


class Scene:
    """An Autoscaling at work, and the keys that it enqueued."""

    def __init__(self, port: int) -> None:
        self.cache, self.registry, self.due = Cache(), CollectorRegistry(), list[Key]()
        self.clock: Callable[[], float] = time.monotonic
        self.scraper, self.port = Scraper(clock=lambda: self.clock()), port
        scrapes = ScrapeMetrics(self.registry, self.windows, lambda: self.clock())
        metrics = AutoscaleMetrics(self.registry)
        self.scaling = Scaling(
            self.cache, self.scraper, scrapes, metrics, port, lambda: self.clock(), lambda: NOW
        )
        self.autoscaling = self.of(KEY)
        self.revision = revision_of(WORKED.spec)
        self.cache.put("PDCluster", cluster(spec={}))
        self.put(child("Service", NAME, spec={"selector": {REVISION: self.revision}}))

    def of(self, key: Key) -> Autoscaling:
        return Autoscaling(key, self.scaling, lambda: self.due.append(key))

    def windows(self) -> list[Windows]:
        return [] if self.autoscaling.windows is None else [self.autoscaling.windows]

    def put(self, *bodies: dict[str, Any]) -> None:
        for body in bodies:
            self.cache.put(body["kind"], body)

    def observed(self) -> Observed:
        body = self.cache.get("PDCluster", *KEY)
        assert body is not None
        return observe(Live(body, list(self.cache.children(KEY))), discovery=ETCD_READY, faults={})

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not holds():
                await asyncio.sleep(0.01)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(
            name, {"namespace": NAMESPACE, "pdcluster": NAME, **labels}
        )


@pytest.fixture
async def server() -> AsyncIterator[WorkerServer]:
    async with WorkerServer(serves(lambda: http(WorkerPages().text()))) as found:
        yield found


@pytest.fixture
async def scene(server: WorkerServer) -> AsyncIterator[Scene]:
    found = Scene(server.port)
    async with found.scraper:
        yield found
        found.autoscaling.stop()


def follow(scene: Scene, cluster: PDCluster = WORKED) -> Any:
    """As a reconcile does; returns the decision that it is handed."""
    return scene.autoscaling.follow(cluster, scene.observed())


def record(decode: int, *conditions: dict[str, Any]) -> dict[str, Any]:
    """A status with the record of a decision."""
    sizes = [
        {"role": "prefill", "pool": "cpu", "replicas": 1},
        {"role": "decode", "pool": "cpu", "replicas": decode},
    ]
    return {"autoscaling": {"mode": "On", "replicas": sizes}, "conditions": list(conditions)}


async def test_a_round_that_says_nothing_new_is_done_with(
    scene: Scene, server: WorkerServer
) -> None:
    missing = {"type": "MetricsMissing", "status": "True", "message": "as it was"}
    scene.put(worker("decode", scene.revision), worker("decode", scene.revision, 1))
    follow(scene)
    await scene.until(lambda: scene.due)
    follow(scene)
    scene.cache.put("PDCluster", cluster(2, spec={}, status=record(2)))
    scene.due.clear()
    seen = len(server.requests)
    # two whole rounds, and the next has begun
    await scene.until(lambda: len(server.requests) >= seen + 6)
    assert scene.due == []
    assert follow(scene) is None

    # its decision, or its problems, are not what the status says
    for version, status in ((3, {}), (4, record(2, missing))):
        scene.cache.put("PDCluster", cluster(version, spec={}, status=status))
        scene.due.clear()
        await scene.until(lambda: scene.due)
    assert follow(scene) is not None


async def test_every_round_with_news_makes_its_cluster_due_and_is_decided_on_once(
    scene: Scene,
) -> None:
    scene.put(worker("decode", scene.revision))
    assert follow(scene) is None
    await scene.until(lambda: scene.due)
    record = follow(scene)
    assert dict(record.replicas) == {("prefill", "cpu"): 1, ("decode", "cpu"): 2}
    assert record.at == NOW
    assert follow(scene) is None
    await scene.until(lambda: len(scene.due) == 2)
    assert follow(scene) is not None


@pytest.mark.parametrize("change", ["generation", "workloads", "serving revision"])
async def test_a_decision_on_another_state_is_not_taken_and_the_next_round_decides(
    scene: Scene, change: str
) -> None:
    scene.put(worker("decode", scene.revision))
    follow(scene)
    await scene.until(lambda: scene.due)
    if change == "generation":
        body = cluster(version=2, spec={})
        scene.cache.put("PDCluster", {**body, "metadata": {**body["metadata"], "generation": 9}})
    elif change == "workloads":
        marks = {"labels": workload_labels(NAME, "decode", "cpu", "0123abcd")}
        size = {"spec": {"replicas": 1}, "status": {"replicas": 1}}
        scene.put(
            child(
                "StatefulSet",
                WorkloadId(NAME, "decode", "cpu", "0123abcd").name,
                metadata=marks,
                **size,
            )
        )
    else:
        scene.put(child("Service", NAME, version=9, spec={"selector": {REVISION: "0123abcd"}}))

    assert follow(scene) is None
    assert scene.metric("pdcluster_operator_autoscale_replicas", role="decode", pool="cpu") is None
    await scene.until(lambda: len(scene.due) > 1)
    assert follow(scene) is not None


async def test_ready_workers_of_the_revision_that_serves_are_scraped(
    scene: Scene, server: WorkerServer
) -> None:
    ending = worker("decode", scene.revision, 2, deletionTimestamp="2026-01-02T03:04:05Z")
    scene.put(
        worker("decode", scene.revision),
        worker("decode", scene.revision, 1, ready=False),
        ending,
        worker("decode", "0123abcd"),
    )
    follow(scene, ONE_ROUND)
    await scene.until(lambda: scene.due)

    assert len(server.requests) == 1
    assert (
        scene.metric(
            "pdcluster_operator_pool_scraped_workers", role="decode", pool="cpu", state="fresh"
        )
        == 1
    )


async def test_a_worker_that_drains_is_scraped_though_it_says_that_it_is_not_ready(
    scene: Scene, server: WorkerServer
) -> None:
    times = [100.0]
    scene.clock = lambda: times[0]
    drains, unready = (worker("decode", scene.revision, ordinal, ready=False) for ordinal in (2, 1))
    for each in (drains, unready):
        each["status"]["containerStatuses"] = [
            {"name": "worker", "started": True, "state": {"running": {}}}
        ]
    identity = WorkloadId(NAME, "decode", "cpu", scene.revision)
    marks = {"labels": workload_labels(NAME, "decode", "cpu", scene.revision)}
    size = {"spec": {"replicas": 3}, "status": {"replicas": 3, "readyReplicas": 1}}
    scene.put(
        child("StatefulSet", identity.name, metadata=marks, **size),
        worker("decode", scene.revision),
        unready,
        drains,
    )
    # so the third is one too many
    scene.cache.put("PDCluster", cluster(2, spec={}, status=record(2)))
    follow(scene)
    await scene.until(
        lambda: (
            scene.metric("pdcluster_operator_autoscale_replicas", role="decode", pool="cpu") == 2
        )
    )
    assert len(server.requests) == 1
    times[0] += 1.0
    await scene.until(
        lambda: (
            (scene.registry.get_sample_value("pdcluster_operator_scrape_seconds_count") or 0) >= 3
        )
    )
    assert (
        scene.metric(
            "pdcluster_operator_pool_scraped_workers", role="decode", pool="cpu", state="fresh"
        )
        == 1
    )


async def test_what_is_no_longer_scaled_by_metrics_is_forgotten(scene: Scene) -> None:
    scene.put(worker("decode", scene.revision))
    follow(scene)
    await scene.until(lambda: scene.due)
    follow(scene)
    assert scene.metric("pdcluster_operator_autoscale_replicas", role="decode", pool="cpu") == 2
    follow(scene, worked_by(AutoscaleSpec()))

    assert follow(scene) is None
    assert scene.metric("pdcluster_operator_autoscale_replicas", role="decode", pool="cpu") is None
    assert (
        scene.metric(
            "pdcluster_operator_pool_scraped_workers", role="decode", pool="cpu", state="fresh"
        )
        is None
    )


async def test_a_shorter_interval_counts_at_once(scene: Scene) -> None:
    follow(scene, ONE_ROUND)
    await scene.until(lambda: scene.due)
    follow(scene)
    await scene.until(lambda: len(scene.due) > 1)


async def test_one_cluster_whose_round_fails_takes_no_other_with_it(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    broken = cluster(version=2)
    scene.cache.put(
        "PDCluster", {**broken, "metadata": {**broken["metadata"], "name": "broken", "uid": "b"}}
    )
    labels = {"pdcluster.io/cluster": "broken"}
    owners = [{"kind": "PDCluster", "name": "broken", "uid": "b"}]
    scene.put(
        child("Service", "broken", metadata={"labels": labels, "ownerReferences": owners}),
    )
    broken_one = scene.of(Key(NAMESPACE, "broken"))
    broken_one.follow(WORKED, scene.observed())  # its Service has no spec
    follow(scene)
    await scene.until(lambda: KEY in scene.due)

    assert "round of scrapes failed key=default/broken" in caplog.text
    assert set(scene.due) == {KEY}
    broken_one.stop()


async def test_a_worker_that_waits_for_a_node_is_counted_from_when_it_was_first_seen(
    scene: Scene,
) -> None:
    times = [100.0]
    scene.clock = lambda: times[0]
    stuck = worker("decode", scene.revision, 1, ready=False)
    stuck["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
    ]
    identity = WorkloadId(NAME, "decode", "cpu", scene.revision)
    marks = {"labels": workload_labels(NAME, "decode", "cpu", scene.revision)}
    scene.put(
        child(
            "StatefulSet",
            identity.name,
            metadata=marks,
            spec={"replicas": 2},
            status={"replicas": 2, "readyReplicas": 1},
        ),
        worker("decode", scene.revision),
        stuck,
    )
    spec = ON.model_copy(update={"capacity_seconds": 60})
    worked = worked_by(spec)
    follow(scene, worked)
    await scene.until(lambda: scene.due)
    assert dict(follow(scene, worked).replicas)["decode", "cpu"] == 2
    times[0] += 61.0
    follow(scene, worked_by(spec.model_copy(update={"stale_after": 4})))
    await scene.until(lambda: len(scene.due) > 1)
    record = follow(scene, worked)
    assert dict(record.replicas)["decode", "cpu"] == 1
    assert [problem.reason for problem in record.problems] == ["CapacityShort"]


def sleeper_of(scene: Scene) -> PDCluster:
    """A cluster that sleeps, with a router, and hourly rounds."""
    pool = {"name": "cpu", "replicas": 0, "minReplicas": 0}
    made = make_cluster(prefill=[pool], decode=[pool])
    roles = made.spec.roles.model_copy(update={"router": WORKED.spec.roles.decode})
    hourly = AutoscaleSpec.model_validate({"mode": "On", "intervalSeconds": 3600})
    changes = {"roles": roles, "autoscale": hourly}
    made = made.model_copy(update={"spec": made.spec.model_copy(update=changes)})
    assert made.spec.may_sleep
    zero = [{"role": role, "pool": "cpu", "replicas": 0} for role in ("prefill", "decode")]
    status = {"autoscaling": {"mode": "On", "replicas": zero}}
    scene.cache.put("PDCluster", cluster(2, spec={}, status=status))
    revision = revision_of(made.spec)
    scene.put(
        child("Service", NAME, version=2, spec={"selector": {REVISION: revision}}),
        worker("router", revision),
    )
    return made


def fails(*_: object) -> None:
    raise ValueError("a fault")


@pytest.mark.parametrize(
    ("name", "fault"),
    [("WAKE_SECONDS", 0.05), ("decide", fails), ("has_changed", lambda *_: True)],
    ids=["goes well", "fails", "is not followed"],
)
async def test_routers_of_a_cluster_that_sleeps_are_scraped_more_often_than_the_interval(
    scene: Scene,
    server: WorkerServer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fault: object,
) -> None:
    monkeypatch.setattr(autoscaling, "WAKE_SECONDS", 0.05)
    monkeypatch.setattr(autoscaling, name, fault)
    follow(scene, sleeper_of(scene))
    seen = len(server.requests)
    await scene.until(lambda: len(server.requests) >= seen + 5)


async def test_requests_at_a_gate_are_counted_from_its_begin_or_from_the_first_round(
    scene: Scene,
) -> None:
    rollout = RolloutSpec(strategy="Rolling", on_failure="Pause", min_requests=200)
    gated = WORKED.model_copy(update={"spec": WORKED.spec.model_copy(update={"rollout": rollout})})
    scene.put(worker("decode", scene.revision))
    follow(scene, gated)
    await scene.until(lambda: any(each.pools() for each in scene.windows()))

    def counted_since(since: datetime) -> str:
        gate = Gate("b", state="Baking", since=since.isoformat())
        found = scene.autoscaling.attainment(gated, gate_field(gate))
        assert found is not None
        return found.counted_since

    assert counted_since(NOW) == ""
    assert counted_since(NOW - timedelta(hours=2)) >= "2026-01-01T23:59:00Z"
    assert scene.autoscaling.attainment(gated, {}) is None
