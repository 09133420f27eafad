"""PodMonitors, rules and dashboard of the chart: real metrics, valid PromQL, each about one
PDCluster.
"""

import json
import re
from typing import Any, get_args

import promql_parser
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.connection import ApiMetrics
from pdcluster_operator.reconcile.metrics import SHOWN, AutoscaleMetrics, ControllerMetrics
from pdcluster_operator.scrape.scraper import ScrapeMetrics
from pdcluster_schema import conditions
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.peers import Hello
from pdcluster_worker.messages.requests import FinishReason
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.peers.pair_check import mismatch
from tests.chart.helm_chart import CHART, RELEASE, Manifest, named, of_kind, only, render
from tests.operator.pdcluster_api.manifests.rendering import matches, pod_of, shared_of

EVERYTHING = {
    "monitoring": {"podMonitors": True, "alerts": True, "labels": {"release": "prometheus"}}
}
OPERATOR = "pdcluster_operator_"
SCOPE = {"namespace", "pdcluster"}
OF_WORKERS = {"pod", "role", "pool", "revision"}
MANIFESTS = render(EVERYTHING)
NAME = f"{RELEASE}-pdcluster"


def worker_series() -> dict[str, set[str]]:
    """Every series of the worker and its own labels, as /metrics names them."""
    found: dict[str, set[str]] = {}
    for family in Metrics().registry.collect():
        for suffix in {
            "counter": ("_total",),
            "histogram": ("_bucket", "_count", "_sum"),
            "gauge": ("",),
        }[family.type]:
            found[family.name + suffix] = own_labels(family.name)
    return found


def own_labels(family: str) -> set[str]:
    metrics = Metrics()
    families = {each.name: each for each in metrics.registry.collect()}
    described = getattr(metrics, family.removeprefix("pdcluster_"), families[family])
    return {
        f"exported_{name}" if name == "role" else name
        for name in getattr(described, "_labelnames", ())
    }


def operator_series() -> dict[str, set[str]]:
    """Every series of the operator that speaks of one PDCluster, and its labels apart from the
    cluster's own.
    """
    registry = CollectorRegistry()
    ControllerMetrics(registry)
    AutoscaleMetrics(registry)
    ScrapeMetrics(registry, lambda: (), lambda: 0.0)
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        labels = set(
            (
                family
                if hasattr(family, "_labelnames")
                else registry._names_to_collectors[family.name]
            )._labelnames
        )
        if labels >= SCOPE:
            found[family.name + ("_total" if family.type == "counter" else "")] = labels - SCOPE
    return found


def all_series() -> dict[str, set[str]]:
    """Every series with all its labels, those that the PodMonitors put on it too."""
    of_workers = {name: labels | OF_WORKERS for name, labels in worker_series().items()}
    of_prometheus = {"ALERTS": {"alertname", "alertstate"}}
    of_metrics = {
        name: labels | SCOPE | {"le"}
        for name, labels in {**of_workers, **operator_series(), **of_prometheus}.items()
    }
    return of_metrics | {name: set(level(name)) for name in RECORDS}


def level(record: str) -> list[str]:
    """The labels that a recording keeps: those of its outermost grouping."""
    expression = RECORDS[record]
    first = re.search(r"by \(([^)]*)\)|(\w+:\w+:\w+)", expression)
    assert first is not None, expression
    return first[1].split(", ") if first[1] else level(first[2])


def group(name: str) -> list[Manifest]:
    groups = only(MANIFESTS, "PrometheusRule")["spec"]["groups"]
    (found,) = [each["rules"] for each in groups if each["name"] == name]
    return list(found)


def rules() -> list[Manifest]:
    """Alerts about PDClusters."""
    return group("pdcluster")


def operator_rules() -> list[Manifest]:
    """Alerts about the operator."""
    return group("pdcluster-operator")


RECORDS: dict[str, str] = {rule["record"]: rule["expr"] for rule in group("pdcluster-records")}


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        named(MANIFESTS, "ConfigMap", f"{NAME}-dashboard")["data"]["pdcluster.json"]
    )
    return content


OF_THE_OPERATOR = "Operator, of all PDClusters"
"""Title of the row that is about no PDCluster."""


def rows() -> dict[str, list[dict[str, Any]]]:
    """Panels of each row; those of a collapsed one are in it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            found[panel["title"]] = inside = list(panel["panels"])
        else:
            inside.append(panel)
    return found


def panels() -> list[dict[str, Any]]:
    """All but those of the operator itself."""
    return [panel for row, inside in rows().items() if row != OF_THE_OPERATOR for panel in inside]


def of_panels() -> list[str]:
    """PromQL of the panels and annotations; Grafana's intervals as Prometheus would get them."""
    return [
        each["expr"].replace("$__rate_interval", "1m").replace("$__range", "1h")
        for each in [
            *(target for panel in panels() for target in panel["targets"]),
            *dashboard()["annotations"]["list"],
        ]
    ]


def expressions() -> list[str]:
    """PromQL of all recordings, alerts and panels."""
    return [*RECORDS.values(), *(rule["expr"] for rule in rules()), *of_panels()]


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


def measured(expression: str) -> list[tuple[str, list[Any]]]:
    """Every series of a process that an expression reads, by itself or through recordings, with
    its matchers.
    """
    found = []
    for selector in selectors(expression):
        outer = list(selector.matchers.matchers)
        read = (
            measured(RECORDS[selector.name]) if selector.name in RECORDS else [(selector.name, [])]
        )
        found += [(name, [*inner, *outer]) for name, inner in read]
    return found


def kept(expression: str) -> set[str]:
    """Labels of what an expression gives."""
    groups = re.findall(r"by \(([^)]*)\)", expression)
    recorded = [name for name in RECORDS if name in expression]
    return {label for each in groups for label in each.split(", ")} or set.intersection(
        *({*level(name)} for name in recorded)
    )


def test_a_recording_is_named_by_the_labels_that_it_keeps_and_is_read() -> None:
    read = {selector.name for expression in expressions() for selector in selectors(expression)}

    assert len(RECORDS) == len(group("pdcluster-records")) > 10
    assert {name: "_".join(level(name)) for name in RECORDS} == {
        name: name.split(":")[0] for name in RECORDS
    }
    assert RECORDS.keys() - read == set()


def test_every_expression_is_valid_and_asks_for_real_metrics_by_labels_that_they_have() -> None:
    known = all_series()
    for expression in expressions():
        for selector in selectors(expression):
            given = {matcher.name for matcher in selector.matchers.matchers}
            assert selector.name in known, expression
            assert given <= known[selector.name], expression


def test_every_grouping_is_by_a_label_that_is_there() -> None:
    known = all_series()
    for expression in expressions():
        have = set.union(*(known[selector.name] for selector in selectors(expression)))
        for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression):
            assert set(group.split(", ")) <= have, expression


def test_panels_about_the_operator_show_every_metric_of_its_own() -> None:
    registry = CollectorRegistry()
    ControllerMetrics(registry)
    ScrapeMetrics(registry, lambda: (), lambda: 0.0)
    ApiMetrics(registry)
    own = {
        family.name
        for family in registry.collect()
        if not any(name.startswith(family.name) for name in operator_series())
    }
    shown = {
        selector.name
        for panel in rows()[OF_THE_OPERATOR]
        for target in panel["targets"]
        for selector in selectors(target["expr"].replace("$__rate_interval", "1m"))
    }

    assert {name for name in own if not any(each.startswith(name) for each in shown)} == set()
    assert {each for each in shown if not any(each.startswith(name) for name in own)} == set()


def test_first_screen_is_an_overview_and_the_rest_is_collapsed() -> None:
    found = [panel for panel in dashboard()["panels"] if panel["type"] == "row"]
    overview = rows()["Overview"]

    assert [row["title"] for row in found if not row["collapsed"]] == ["Overview"]
    assert {panel["type"] for panel in overview} == {"stat"}
    assert max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in overview) <= 9


def test_alerts_about_the_operator_ask_for_its_metrics_and_say_what_to_do() -> None:
    registry = CollectorRegistry()
    ControllerMetrics(registry)
    known = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in registry.collect()
    }
    for rule in operator_rules():
        assert {selector.name for selector in selectors(rule["expr"])} <= known
        assert re.findall(r"by \(([^)]*)\)", rule["expr"]) == ["namespace"]
        assert rule["annotations"]["summary"].startswith(
            "PDCluster operator in {{ $labels.namespace }}: "
        )
        assert min(len(rule["annotations"][part]) for part in ("description", "runbook")) > 40


def test_conditions_that_alerts_ask_for_are_shown_and_their_reasons_are_real() -> None:
    known = {value for value in vars(conditions).values() if isinstance(value, str)}
    requested = [
        (matcher.name, each)
        for rule in rules()
        for selector in selectors(rule["expr"])
        if selector.name == f"{OPERATOR}condition"
        for matcher in selector.matchers.matchers
        for each in matcher.value.split("|")
    ]

    assert {value for name, value in requested if name == "type"} <= set(SHOWN)
    assert {value for name, value in requested if name == "reason"} <= known
    assert len(requested) > 5


def test_an_alert_or_recording_is_about_one_pdcluster_at_a_time_and_names_it() -> None:
    for expression in (*RECORDS.values(), *(rule["expr"] for rule in rules())):
        groups = re.findall(r"(?:by|on) \(([^)]*)\)", expression)
        assert groups or selectors(expression)[0].name in RECORDS, expression
        assert all(each.split(", ")[:2] == ["namespace", "pdcluster"] for each in groups), (
            expression
        )
        assert not re.search(r"\b(sum|max|min|avg|count|absent|vector) ?\(", expression), expression


def test_a_panel_is_about_the_pdcluster_that_the_variables_name() -> None:
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}

    assert variables == {"datasource", *SCOPE}
    for expression in of_panels():
        for selector in selectors(expression):
            given = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            assert {name: given.get(name) for name in SCOPE} == {
                name: f"${name}" for name in SCOPE
            }, expression


def test_every_metric_of_the_operator_about_a_cluster_is_on_the_dashboard() -> None:
    """But what it read of the workers: that is theirs, and on the dashboard as such."""
    shown = {name for expression in of_panels() for name, _ in measured(expression)}
    read = {f"{OPERATOR}pool_{name.removeprefix('pdcluster_')}" for name in worker_series()}

    assert operator_series().keys() - read - shown == set()
    assert len(operator_series().keys() - read) > 5


def test_what_stands_in_the_autoscalers_way_is_an_alert() -> None:
    """The reasons of its gauge are the conditions, and each is in one alert."""
    matchers = [
        matcher.value
        for rule in rules()
        for selector in selectors(rule["expr"])
        for matcher in selector.matchers.matchers
        if selector.name == f"{OPERATOR}autoscale_problems" and matcher.name == "reason"
    ]

    assert sorted("|".join(matchers).split("|")) == sorted(conditions.AUTOSCALING)


def test_every_metric_of_the_worker_is_on_the_dashboard() -> None:
    shown = {name for expression in of_panels() for name, _ in measured(expression)}
    families = {family.name for family in Metrics().registry.collect()}

    assert {
        family for family in families if not any(name.startswith(family) for name in shown)
    } == set()


@pytest.mark.parametrize(
    ("histogram", "bound", "written"),
    [
        ("time_to_first_token_seconds", "2.5", "), 2.5)"),
        ("time_per_output_token_seconds", "0.1", "), 0.1)"),
        ("remote_prefill_phase_seconds", "1.0", 'le="1.0"'),
    ],
)
def test_bounds_of_alerts_are_bounds_of_buckets(histogram: str, bound: str, written: str) -> None:
    metric = getattr(Metrics(), histogram)
    if metric._labelnames:
        metric.labels("queue")
    (family,) = metric.collect()

    assert bound in {sample.labels.get("le") for sample in family.samples}
    assert any(written in each for each in expressions() if f"pdcluster_{histogram}" in each)


def test_every_refusal_that_is_answered_503_counts_in_the_alert() -> None:
    expression = RECORDS["namespace_pdcluster:pdcluster_request_refused:rate5m"]
    assert all(
        reason in expression
        for reason in (
            "queue_full",
            "draining",
            "not_ready",
            "no_prefill_worker",
            "no_decode_worker",
        )
    )


def test_alerts_say_what_is_wrong_where_and_what_to_do() -> None:
    found = rules()

    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert set(rule["labels"]) == {"severity"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].startswith(
            "PDCluster {{ $labels.namespace }}/{{ $labels.pdcluster }}: "
        )
        assert min(len(rule["annotations"][part]) for part in ("description", "runbook")) > 40


def test_every_alert_leads_to_its_own_part_of_the_troubleshooting_page() -> None:
    page = (CHART.parents[1] / "docs" / "troubleshooting.md").read_text()
    found = [*rules(), *operator_rules()]

    assert re.findall(r"^### (PDCluster\w+)$", page, re.MULTILINE) == [
        rule["alert"] for rule in found
    ]
    assert [rule["annotations"]["runbook_url"] for rule in found] == [
        f"docs/troubleshooting.md#{rule['alert'].lower()}" for rule in found
    ]


def test_address_of_the_documentation_goes_before_the_links_of_alerts() -> None:
    monitoring = {**EVERYTHING["monitoring"], "docsUrl": "https://docs.example.com/pd/"}
    made = only(render({"monitoring": monitoring}), "PrometheusRule")["spec"]["groups"]

    assert made[1]["rules"][1]["annotations"]["runbook_url"] == (
        "https://docs.example.com/pd/troubleshooting/#pdclusternorouter"
    )


def test_labels_in_alert_texts_are_in_their_results() -> None:
    for rule in rules():
        for label in re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())):
            assert label in kept(rule["expr"]), rule["alert"]


def test_pod_monitor_scrapes_all_workers_under_the_labels_of_the_expressions() -> None:
    monitor = named(MANIFESTS, "PodMonitor", f"{NAME}-workers")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    targets = {each["targetLabel"]: each["sourceLabels"] for each in endpoint["relabelings"]}

    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert targets == {
        "pdcluster": ["__meta_kubernetes_pod_label_pdcluster_io_cluster"],
        **{
            label: [f"__meta_kubernetes_pod_label_pdcluster_io_{label}"]
            for label in ("role", "pool", "revision")
        },
    }
    assert matches(monitor["spec"]["selector"], pod_of(role="prefill")["metadata"]["labels"])
    assert not matches(
        monitor["spec"]["selector"],
        shared_of()["Deployment", "chat-etcd"]["spec"]["template"]["metadata"]["labels"],
    )


@pytest.mark.parametrize(
    ("namespaces", "selector"),
    [([], {"any": True}), (["models", "research"], {"matchNames": ["models", "research"]})],
)
def test_workers_are_scraped_in_the_namespaces_that_the_operator_looks_after(
    namespaces: list[str], selector: Manifest
) -> None:
    monitor = named(
        render({**EVERYTHING, "watchNamespaces": namespaces}), "PodMonitor", f"{NAME}-workers"
    )

    assert monitor["spec"]["namespaceSelector"] == selector


def test_dashboard_fits_grafanas_grid() -> None:
    shown = dashboard()["panels"]
    collapsed = [row for row in shown if row["type"] == "row" and row["collapsed"]]
    every = [*shown, *(panel for row in collapsed for panel in row["panels"])]

    for together in (shown, *(row["panels"] for row in collapsed)):
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in together]
        assert len(set(places)) == len(places)
        assert places == sorted(places, key=lambda place: (place[1], place[0]))
    assert all(
        panel["gridPos"]["y"] > row["gridPos"]["y"] for row in collapsed for panel in row["panels"]
    )
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in every)
    assert len({panel["id"] for panel in every}) == len(every)
    assert len({panel["title"] for panel in every}) == len(every)


def test_dashboard_legends_name_labels_that_the_expression_keeps() -> None:
    for panel in panels():
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in kept(target["expr"]), panel["title"]


def test_monitoring_objects_carry_the_labels_that_prometheus_selects_by() -> None:
    made = [
        manifest
        for manifest in MANIFESTS
        if manifest["metadata"]["labels"].get("release") == "prometheus"
    ]

    assert [manifest["kind"] for manifest in made] == [
        "ConfigMap",
        "PodMonitor",
        "PodMonitor",
        "PrometheusRule",
    ]
    assert made[0]["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_pod_monitor_bounds_what_a_worker_may_say_to_prometheus() -> None:
    """Every bound is one that Prometheus' operator takes as it is written."""
    spec = named(MANIFESTS, "PodMonitor", f"{NAME}-workers")["spec"]

    limits = {name: value for name, value in spec.items() if name.endswith("Limit")}
    assert set(limits) == {
        "sampleLimit",
        "labelLimit",
        "labelNameLengthLimit",
        "labelValueLengthLimit",
        "bodySizeLimit",
    }
    assert re.fullmatch(r"[1-9][0-9]*(K|M)i?B", limits.pop("bodySizeLimit"))
    assert all(isinstance(value, int) and value > 0 for value in limits.values())


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        ("podMonitors", {"PrometheusRule", "ConfigMap"}),
        ("alerts", {"PodMonitor", "ConfigMap"}),
        ("dashboard", {"PodMonitor", "PrometheusRule"}),
    ],
)
def test_each_monitoring_object_can_be_left_out(value: str, kinds: set[str]) -> None:
    made = render({"monitoring": {**EVERYTHING["monitoring"], value: False}})

    assert {manifest["kind"] for manifest in made} & {
        "PodMonitor",
        "PrometheusRule",
        "ConfigMap",
    } == kinds


@pytest.mark.parametrize("kind", ["PodMonitor", "PrometheusRule"])
def test_by_default_what_the_api_server_has_a_kind_for_is_made(kind: str) -> None:
    assert of_kind(render(), kind) == []
    assert of_kind(render(None, "--api-versions", f"monitoring.coreos.com/v1/{kind}"), kind)


def test_label_values_that_alerts_count_by_are_there_from_the_start() -> None:
    """A counter that begins at 1 has not increased; gauges are asked whether they are absent."""
    zeros = [
        sample
        for family in Metrics().registry.collect()
        for sample in family.samples
        if sample.value == 0.0
    ]
    counted = [
        (name, matcher.name, value)
        for rule in rules()
        for name, matchers in measured(rule["expr"])
        if name.endswith("_total") and not name.startswith(OPERATOR)
        for matcher in matchers
        if matcher.name not in OF_WORKERS
        for value in matcher.value.split("|")
    ]
    known = {(sample.name, *label) for sample in zeros for label in sample.labels.items()}

    assert len(counted) > 3
    assert set(counted) - known == set()


def test_every_reason_of_a_refused_pair_is_there_from_the_start() -> None:
    hello = Hello("e", "decode", KVGeometry(1, 1, 1, 1, "float32", "full"), "a", "r1")
    other_geometry = KVGeometry(2, 1, 1, 1, "float32", "full")
    others = [
        replace(hello, **change)
        for change in (
            {"geometry": other_geometry},
            {"weights": "b"},
            {"revision": "r2"},
            {"operations": "x"},
        )
    ]
    registry, name = Metrics().registry, "pdcluster_peer_refused_total"

    assert [
        registry.get_sample_value(name, {"reason": (mismatch(hello, other) or ("", ""))[0]})
        for other in others
    ] == [0, 0, 0, 0]


@pytest.mark.parametrize("reason", get_args(FinishReason))
def test_every_good_end_is_there_from_the_start(reason: str) -> None:
    assert (
        Metrics().registry.get_sample_value(
            "pdcluster_request_success_total", {"finish_reason": reason}
        )
        == 0.0
    )
