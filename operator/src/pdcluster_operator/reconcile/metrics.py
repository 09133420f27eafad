"""Metrics of the loop, of each PDCluster (for the chart's alerts) and of the autoscaler."""

from collections import Counter as Tally
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdcluster_api.apiserver.kinds import Key
from pdcluster_api.plan.autoscale.values import Outcome
from pdcluster_api.plan.cluster import PoolAccelerators
from pdcluster_api.plan.observed.state import Previous, ScalingDecision
from pdcluster_api.plan.status.transfers import FIELD
from pdcluster_schema import conditions as words
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.qos import SloSpec

# Conditions of which a user may want an alert: what each of the others says is in Ready too, or a
# metric of its own
SHOWN = (
    words.READY,
    words.STALLED,
    words.DISCOVERY_READY,
    words.KV_TRANSFER_VERIFIED,
    words.ACCELERATORS_IN_USE,
    words.KV_TIERS_AVAILABLE,
    words.OTHER_MODELS_SERVED,
)

# Roles that a worker has before and after
_FLIPS = (("prefill", "decode"), ("decode", "prefill"))

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ControllerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"pdcluster_operator_{name}", text, labels, registry=registry)

        cluster = ("namespace", "pdcluster")
        self.queue_depth = gauge("queue_depth", "PDClusters that wait to be reconciled.")
        self.reconcile_seconds = Histogram(
            "pdcluster_operator_reconcile_seconds",
            "Seconds to reconcile one PDCluster: look, plan, act and report.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.reconcile_errors = Counter(
            "pdcluster_operator_reconcile_errors",
            "Reconciles that ended with an exception.",
            registry=registry,
        )
        self.is_leader = gauge("is_leader", "1 while this replica leads.")
        by_ready = "PDClusters by status of their Ready condition."
        self.pdclusters = gauge("pdclusters", by_ready, ["ready"])
        for value in ("True", "False", "Unknown"):
            self.pdclusters.labels(value)
        self.drains_cut = Counter(
            "pdcluster_operator_drains_cut",
            "Workers that were scaled away before they had drained, because "
            "rollout.drainTimeoutSeconds was over.",
            cluster,
            registry=registry,
        )
        serving = "Workers that should answer requests now, by role."
        self._serving = gauge("serving_replicas", serving, [*cluster, "role"])
        slo = "Latency objectives of spec.qos.slo, ttft and tpot; 0 = none."
        self._slo = gauge("slo_seconds", slo, [*cluster, "objective"])
        self._certificates = gauge(
            "certificate_expiry_timestamp_seconds",
            "Time when the certificate ends by which the workers of a PDCluster know each other.",
            cluster,
        )
        self._verified_rate = _ClusterGauge(
            "pdcluster_operator_kv_transfer_verified_bytes_per_second",
            "Rate of the last verified KV transfer from a prefill pool to a decode pool.",
            ["prefill", "decode", "transport"],
            registry,
        )
        self.capacity = CapacityMetrics(registry)
        self._conditions = _ClusterGauge(
            "pdcluster_operator_condition",
            "1 while a condition is True, 0 while it is False, with its reason; none while it is "
            "Unknown.",
            ["type", "reason"],
            registry,
        )

    def show_ready(self, before: str | None, after: str | None) -> None:
        """Count a PDCluster under the status of its Ready condition; None = it is not there."""
        if before is not None:
            self.pdclusters.labels(before).dec()
        if after is not None:
            self.pdclusters.labels(after).inc()

    def show_cluster(self, key: Key, serving: Mapping[str, int], slo: SloSpec) -> None:
        """Show a PDCluster as it should be now.  serving: workers that answer requests, by role"""
        for role, replicas in serving.items():
            self._serving.labels(*key, role).set(replicas)
        self._slo.labels(*key, "ttft").set(slo.ttft_milliseconds / 1000)
        self._slo.labels(*key, "tpot").set((slo.tpot_milliseconds or 0.0) / 1000)

    def show_status(self, key: Key, status: Mapping[str, Any]) -> None:
        previous = Previous(status)
        shown = {
            (str(each["type"]), str(each.get("reason", ""))): float(each["status"] == "True")
            for each in previous.conditions()
            if each.get("type") in SHOWN and each.get("status") in ("True", "False")
        }
        self._conditions.show(key, shown.items())
        rates = {
            (pair["prefill"], pair["decode"], pair.get("transport", "")): pair["bytesPerSecond"]
            for pair in previous.mapping(FIELD).get("pairs", ())
            if "bytesPerSecond" in pair
        }
        self._verified_rate.show(key, rates.items())

    def show_certificates(self, key: Key, ends: datetime | None) -> None:
        if ends is None:
            self._certificates.remove(*key)
        else:
            self._certificates.labels(*key).set(ends.timestamp())

    def forget(self, key: Key) -> None:
        self.drains_cut.remove(*key)
        self._verified_rate.show(key, ())
        self._conditions.show(key, ())
        self.capacity.forget(key)
        self._certificates.remove(*key)
        for metric in (self._serving, self._slo):
            metric.remove_by_labels({"namespace": key.namespace, "pdcluster": key.name})


class CapacityMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._accelerators = _ClusterGauge(
            "pdcluster_operator_accelerators",
            "Accelerators of workers that should run, those of a roll out included, and of ready "
            "ones; a worker without any counts as one where its type has a price.",
            ["role", "pool", "gpu", "state"],
            registry,
        )
        self._prices = _ClusterGauge(
            "pdcluster_operator_accelerator_price_per_hour",
            "Price of one accelerator for an hour, by spec.accelerators.",
            ["gpu"],
            registry,
        )

    def show(self, key: Key, spec: PDClusterSpec, pools: PoolAccelerators) -> None:
        states = ("desired", "ready")
        values = {
            (*pool, state): float(number)
            for pool, numbers in pools.items()
            for state, number in zip(states, numbers, strict=True)
        }
        self._accelerators.show(key, values.items())
        prices = {gpu: spec.price_per_hour(gpu) for _, _, gpu in pools}
        self._prices.show(key, (((gpu,), price) for gpu, price in prices.items() if price))

    def forget(self, key: Key) -> None:
        self._accelerators.show(key, ())
        self._prices.show(key, ())


class AutoscaleMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._replicas = _ClusterGauge(
            "pdcluster_operator_autoscale_replicas",
            "Workers that serve a pool's role by the autoscaler's last decision, or would.",
            ["role", "pool"],
            registry,
        )
        self._changes = Counter(
            "pdcluster_operator_autoscale_changes",
            "Decisions with other replicas than the one before.",
            ["namespace", "pdcluster"],
            registry=registry,
        )
        self._flips = Counter(
            "pdcluster_operator_role_flips",
            "Workers that were given the other role, by the role that they had and the one that "
            "they were to have.",
            ["namespace", "pdcluster", "from", "to"],
            registry=registry,
        )
        self._problems = _ClusterGauge(
            "pdcluster_operator_autoscale_problems",
            "What stands in the autoscaler's way, by reason.",
            ["reason"],
            registry,
        )

    def show(self, key: Key, outcome: Outcome, before: Outcome | None) -> None:
        decision = outcome.decision
        replicas = {key: decision.serving(key) for key in decision.replicas}
        # there from the start: a counter that begins at 1 has not increased
        self._changes.labels(*key)
        is_changed = outcome.changed
        if before is not None:
            old = before.decision
            is_changed = (decision.replicas, decision.flipped) != (old.replicas, old.flipped)
        if is_changed:
            self._changes.labels(*key).inc()
        self._count_flips(key, decision, None if before is None else before.decision)
        self._replicas.show(key, replicas.items())
        reasons = Tally(problem.reason for problem in decision.problems)
        self._problems.show(key, (((reason,), number) for reason, number in reasons.items()))

    def _count_flips(
        self, key: Key, decision: ScalingDecision, before: ScalingDecision | None
    ) -> None:
        if {role for role, _ in decision.replicas} == {"prefill", "decode"}:
            for roles in _FLIPS:  # there from the start too
                self._flips.labels(*key, *roles)
        if before is None:
            return
        moved = _num_away(decision) - _num_away(before)
        if moved:
            self._flips.labels(*key, *_FLIPS[moved < 0]).inc(abs(moved))

    def forget(self, key: Key) -> None:
        self._replicas.show(key, ())
        self._problems.show(key, ())
        self._changes.remove(*key)
        for roles in _FLIPS:
            self._flips.remove(*key, *roles)


def _num_away(decision: ScalingDecision) -> int:
    """Workers of prefill that serve decode; negative = the other way round."""
    flipped = decision.flipped
    if flipped is None:
        return 0
    return flipped.workers if flipped.home[0] == "prefill" else -flipped.workers


class _ClusterGauge:
    """A gauge of each PDCluster by further labels.  Showing one costs nothing for the others.

    _shown: those labels of each PDCluster
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._gauge = Gauge(name, text, ["namespace", "pdcluster", *labels], registry=registry)
        self._shown: dict[Key, frozenset[tuple[str, ...]]] = {}

    def show(self, key: Key, values: Iterable[tuple[tuple[str, ...], float]]) -> None:
        now = dict(values)
        for labels in self._shown.pop(key, frozenset()) - now.keys():
            self._gauge.remove(*key, *labels)
        for labels, value in now.items():
            self._gauge.labels(*key, *labels).set(value)
        if now:
            self._shown[key] = frozenset(now)
