"""PodMonitor, alerts and dashboard: real metrics, valid PromQL, this cluster only."""

import json
import re
from dataclasses import replace
from typing import Any, get_args

import promql_parser
import pytest
from prometheus_client import CollectorRegistry

from pdcluster_api.manifests.alerts import QUEUE_BOUND, TPOT_BOUND, TTFT_BOUND
from pdcluster_api.manifests.render import Capabilities, Manifest, render_shared
from pdcluster_api.schema import conditions
from pdcluster_operator.reconcile.metrics import AutoscaleMetrics, LoopMetrics
from pdcluster_operator.scrape.metrics import ScrapeMetrics
from pdcluster_worker.messages.facts import KVGeometry, PeerFacts
from pdcluster_worker.messages.requests import FinishReason
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.geometry import reason_label
from tests.operator.object_cases import Change, at, both
from tests.operator.pdcluster_api.manifests.rendering import EVERYTHING, OWNER, SITE, cluster_of, matches, pod_of, shared_of

MIXED = both(at("spec.roles", {"mixed": {"pools": [{"name": "cpu", "replicas": 1}]}}), at("spec.autoscale.mode", "Advise"))
OPERATOR = "pdcluster_operator_"
LABELS = both(at("spec.monitoring.labels", {"release": "prometheus"}), at("spec.autoscale", {"mode": "On", "budget": {"total": 9}}))
SCOPE = {"namespace": "serving", "pdcluster": "chat"}
ALWAYS = {"namespace", "pdcluster", "pod", "le"}


def worker_series() -> dict[str, set[str]]:
    """Every series of the worker and its own labels, as /metrics names them."""
    found: dict[str, set[str]] = {}
    for family in Metrics().registry.collect():
        for suffix in {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}[family.type]:
            found[family.name + suffix] = own_labels(family.name)
    return found


def own_labels(family: str) -> set[str]:
    collector = getattr(Metrics(), family.removeprefix("pdcluster_"))
    return {f"exported_{name}" if name == "role" else name for name in getattr(collector, "_labelnames", ())}


def operator_series() -> dict[str, set[str]]:
    """Every series of the operator that speaks of one PDCluster, and its labels besides the cluster's own."""
    registry = CollectorRegistry()
    LoopMetrics(registry)
    AutoscaleMetrics(registry)
    ScrapeMetrics(registry, lambda: (), lambda: 0.0)
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        labels = set((family if hasattr(family, "_labelnames") else registry._names_to_collectors[family.name])._labelnames)
        if SCOPE.keys() <= labels:
            found[family.name + ("_total" if family.type == "counter" else "")] = labels - SCOPE.keys()
    return found


def all_series() -> dict[str, set[str]]:
    return {**worker_series(), **operator_series()}


def rules(*changes: Change) -> list[Manifest]:
    (group,) = shared_of(*changes)["PrometheusRule", "chat"]["spec"]["groups"]
    found: list[Manifest] = group["rules"]
    return found


def dashboard(*changes: Change) -> dict[str, Any]:
    data = shared_of(*changes)["ConfigMap", "chat-dashboard"]["data"]
    content: dict[str, Any] = json.loads(data["pdcluster-serving-chat.json"])
    return content


def expressions(*changes: Change) -> list[str]:
    """PromQL of all alerts and panels; Grafana's interval as Prometheus would get it."""
    panels = [target["expr"] for panel in dashboard(*changes)["panels"] for target in panel["targets"]]
    return [text.replace("$__rate_interval", "1m") for text in (*(rule["expr"] for rule in rules(*changes)), *panels)]


def selectors(expression: str) -> list[Any]:
    """Every vector selector of an expression."""
    found: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit, lambda node: True)
    assert found, expression
    return found


@pytest.mark.parametrize("change", [LABELS, MIXED], ids=["1P1D", "mixed"])
def test_every_expression_is_valid_and_asks_for_real_metrics_of_this_cluster(change: Change) -> None:
    known = all_series()
    for expression in expressions(change):
        for selector in selectors(expression):
            given = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            assert selector.name in known, expression
            assert SCOPE.items() <= given.items(), expression
            assert given.keys() <= known[selector.name] | ALWAYS | {"role", "pool", "revision"}, expression


@pytest.mark.parametrize("change", [LABELS, MIXED], ids=["1P1D", "mixed"])
def test_every_grouping_is_by_a_label_that_is_there(change: Change) -> None:
    known = all_series()
    for expression in expressions(change):
        have = set.union(*(known[selector.name] for selector in selectors(expression))) | ALWAYS | {"role", "pool", "revision"}
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert set(group.split(", ")) <= have, expression


def test_every_metric_of_the_operator_about_a_cluster_is_on_the_dashboard() -> None:
    """But what it read of the workers: that is theirs, and on the dashboard as such."""
    shown = {selector.name for expression in expressions(LABELS) for selector in selectors(expression)}
    read = {f"{OPERATOR}pool_{name.removeprefix('pdcluster_')}" for name in worker_series()}

    assert operator_series().keys() - read - shown == set()
    assert len(operator_series().keys() - read) > 5


def test_without_the_autoscaler_nothing_is_said_of_it() -> None:
    text = " ".join(expressions())

    assert f"{OPERATOR}drains_cut_total" in text
    assert f"{OPERATOR}autoscale" not in text
    assert f"{OPERATOR}autoscale" in " ".join(expressions(MIXED))


def test_what_stands_in_the_autoscalers_way_is_an_alert() -> None:
    """The reasons of its gauge are the conditions, and each is in one alert."""
    matchers = [
        matcher.value
        for rule in rules(LABELS)
        for selector in selectors(rule["expr"])
        for matcher in selector.matchers.matchers
        if selector.name == f"{OPERATOR}autoscale_problems" and matcher.name == "reason"
    ]

    assert sorted("|".join(matchers).split("|")) == sorted(conditions.AUTOSCALING)


def test_every_metric_of_the_worker_is_on_the_dashboard() -> None:
    shown = {selector.name for expression in expressions() for selector in selectors(expression)}
    families = {family.name for family in Metrics().registry.collect()}

    assert {family for family in families if not any(name.startswith(family) for name in shown)} == set()


@pytest.mark.parametrize(
    ("histogram", "bound"),
    [
        ("time_to_first_token_seconds", TTFT_BOUND),
        ("time_per_output_token_seconds", TPOT_BOUND),
        ("remote_prefill_phase_seconds", QUEUE_BOUND),
    ],
)
def test_bounds_of_alerts_are_bounds_of_buckets(histogram: str, bound: str) -> None:
    metric = getattr(Metrics(), histogram)
    if metric._labelnames:
        metric.labels("queue")
    (family,) = metric.collect()

    assert bound in {sample.labels.get("le") for sample in family.samples}
    assert any(f'le="{bound}"' in rule["expr"] for rule in rules())


def test_every_refusal_that_is_answered_503_counts_in_the_alert() -> None:
    (expression,) = [rule["expr"] for rule in rules() if rule["alert"] == "PDClusterRequestsRefused"]
    assert all(reason in expression for reason in ("queue_full", "draining", "not_ready", "no_prefill_worker", "no_decode_worker"))


def test_alerts_say_what_is_wrong_where_and_what_to_do() -> None:
    found = rules()

    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert rule["labels"] == {"severity": rule["labels"]["severity"], **SCOPE}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].startswith("PDCluster serving/chat: ")
        assert min(len(rule["annotations"][part]) for part in ("description", "runbook")) > 40


def test_labels_in_alert_texts_are_in_their_results() -> None:
    for rule in rules():
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["description"]):
            assert re.search(rf"by \([^)]*\b{label}\b", rule["expr"]), rule["alert"]


def test_mixed_cluster_has_nothing_about_remote_prefill() -> None:
    text = " ".join(expressions(MIXED))

    assert 'role="mixed"' in text
    assert "remote_prefill" not in text
    assert "kv_transfer" not in text
    assert 'role="decode"' not in text


def test_pod_monitor_scrapes_all_workers_under_the_labels_of_the_expressions() -> None:
    monitor = shared_of()["PodMonitor", "chat"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    targets = {each["targetLabel"]: each["sourceLabels"] for each in endpoint["relabelings"]}

    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert targets == {
        "pdcluster": ["__meta_kubernetes_pod_label_pdcluster_io_cluster"],
        **{label: [f"__meta_kubernetes_pod_label_pdcluster_io_{label}"] for label in ("role", "pool", "revision")},
    }
    assert matches(monitor["spec"]["selector"], pod_of(role="prefill")["metadata"]["labels"])
    assert not matches(monitor["spec"]["selector"], shared_of()["StatefulSet", "chat-etcd"]["spec"]["template"]["metadata"]["labels"])


def test_dashboard_fits_grafanas_grid_and_keeps_its_address() -> None:
    content = dashboard()
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in content["panels"]]

    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in content["panels"])
    assert len(content["uid"]) <= 40
    assert content == dashboard(at("spec.monitoring.labels", {"release": "prometheus"}))
    assert len({panel["title"] for panel in content["panels"]}) == len(content["panels"])


def test_dashboard_legends_name_labels_that_the_expression_keeps() -> None:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), panel["title"]


def test_monitoring_objects_carry_the_labels_that_prometheus_selects_by() -> None:
    shared = shared_of(LABELS)

    for key in (("PodMonitor", "chat"), ("PrometheusRule", "chat"), ("ConfigMap", "chat-dashboard")):
        assert shared[key]["metadata"]["labels"]["release"] == "prometheus"
    assert shared["ConfigMap", "chat-dashboard"]["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_pod_monitor_bounds_what_a_worker_may_say_to_prometheus() -> None:
    """Who chooses the image chooses the page.  Every bound is one that Prometheus' operator takes as it is written."""
    spec = shared_of()["PodMonitor", "chat"]["spec"]

    limits = {name: value for name, value in spec.items() if name.endswith("Limit")}
    assert set(limits) == {"sampleLimit", "labelLimit", "labelNameLengthLimit", "labelValueLengthLimit", "bodySizeLimit"}
    assert re.fullmatch(r"[1-9][0-9]*(K|M)i?B", limits.pop("bodySizeLimit"))
    assert all(isinstance(value, int) and value > 0 for value in limits.values())


@pytest.mark.parametrize(
    ("field", "kind", "name"),
    [("podMonitor", "PodMonitor", "chat"), ("alerts", "PrometheusRule", "chat"), ("dashboard", "ConfigMap", "chat-dashboard")],
)
def test_each_monitoring_object_can_be_left_out(field: str, kind: str, name: str) -> None:
    assert (kind, name) in shared_of()
    assert (kind, name) not in shared_of(at(f"spec.monitoring.{field}", False))


@pytest.mark.parametrize(
    ("change", "capabilities"),
    [(at("spec.monitoring.podMonitor", False), EVERYTHING), (LABELS, Capabilities(pod_monitor=False, prometheus_rule=True))],
    ids=["not wanted", "no such kind"],
)
def test_cluster_that_is_not_scraped_has_no_alerts(change: Change, capabilities: Capabilities) -> None:
    """They would fire at once, for the absence of metrics."""
    kinds = {kind for kind, _ in shared_of(change, capabilities=capabilities)}

    assert not kinds & {"PodMonitor", "PrometheusRule"}


def test_alerts_are_about_the_role_that_answers_now() -> None:
    manifests = render_shared(cluster_of(MIXED), OWNER, SITE, EVERYTHING, "0a1b2c3d", serving_role="decode")
    (rule,) = [manifest for manifest in manifests if manifest["kind"] == "PrometheusRule"]
    text = json.dumps(rule["spec"])

    assert 'role=\\"decode\\"' in text
    assert 'role=\\"mixed\\"' not in text


def test_cluster_whose_routers_are_gone_has_an_alert_while_its_decode_workers_run() -> None:
    routers = at("spec.roles.router", {"pools": [{"name": "cpu", "replicas": 1}]})
    absent = {rule["alert"]: rule["expr"] for rule in rules(routers) if rule["expr"].startswith("absent(pdcluster_num_requests_running")}

    assert sorted(re.findall(r'role="(\w+)"', " ".join(absent.values()))) == ["decode", "router"]
    assert not any('role="router"' in rule["expr"] for rule in rules())


def test_label_values_that_alerts_count_by_are_there_from_the_start() -> None:
    """A counter that begins at 1 has not increased; gauges are asked whether they are absent."""
    zeros = [sample for family in Metrics().registry.collect() for sample in family.samples if sample.value == 0.0]
    counted = []
    for selector in (selector for rule in rules() for selector in selectors(rule["expr"]) if selector.name.endswith("_total")):
        for matcher in selector.matchers.matchers:
            if matcher.name not in {*SCOPE, "role", "pool", "revision"} and not selector.name.startswith(OPERATOR):
                counted += [(selector.name, matcher.name, value) for value in matcher.value.split("|")]
    known = {(sample.name, *label) for sample in zeros for label in sample.labels.items()}

    assert len(counted) > 3
    assert set(counted) - known == set()


def test_every_reason_of_a_refused_pair_is_there_from_the_start() -> None:
    facts = PeerFacts(KVGeometry(1, 1, 1, 1, "float32", "full"), "a", "r1")
    other_geometry = KVGeometry(2, 1, 1, 1, "float32", "full")
    others = [
        replace(facts, **change) for change in ({"geometry": other_geometry}, {"weights": "b"}, {"revision": "r2"}, {"operations": "x"})
    ]
    registry, name = Metrics().registry, "pdcluster_peer_refused_total"

    assert [registry.get_sample_value(name, {"reason": str(reason_label(facts, other))}) for other in others] == [0, 0, 0, 0]


@pytest.mark.parametrize("reason", get_args(FinishReason))
def test_every_good_end_is_there_from_the_start(reason: str) -> None:
    assert Metrics().registry.get_sample_value("pdcluster_request_success_total", {"finish_reason": reason}) == 0.0


def test_kinds_that_the_api_server_lacks_are_not_made() -> None:
    kinds = {kind for kind, _ in shared_of(capabilities=Capabilities(pod_monitor=False, prometheus_rule=False))}

    assert not kinds & {"PodMonitor", "PrometheusRule"}
    assert "PodMonitor" in {kind for kind, _ in shared_of(capabilities=Capabilities(pod_monitor=True, prometheus_rule=False))}
