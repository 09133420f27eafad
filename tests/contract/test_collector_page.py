"""The OpenTelemetry collector of docs/operations.md scrapes as the chart's PodMonitors do."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.helm_chart import CHART, RELEASE, named, render
from tests.contract.prometheus_rules import needs_promtool, promtool

PAGE = (CHART.parents[1] / "docs" / "operations.md").read_text()
COLLECTOR: dict[str, Any] = yaml.safe_load(
    PAGE.partition("### OpenTelemetry")[2].partition("```yaml\n")[2].partition("```")[0]
)
SCRAPES = COLLECTOR["receivers"]["prometheus"]["config"]
WORKERS, OPERATOR = SCRAPES["scrape_configs"]
OF_THE_OPERATOR_OF_PROMETHEUS = {
    "namespace": ["__meta_kubernetes_namespace"],
    "pod": ["__meta_kubernetes_pod_name"],
}
"""Labels that it puts on the series of every PodMonitor."""


def labels(scrape: dict[str, Any]) -> dict[str, list[str]]:
    rules = scrape["relabel_configs"]
    return {each["target_label"]: each["source_labels"] for each in rules if "target_label" in each}


POD = {
    "__meta_kubernetes_namespace": "models",
    "__meta_kubernetes_pod_container_port_name": "http",
    "__meta_kubernetes_pod_name": "chat-decode-cpu-0",
    "__meta_kubernetes_pod_label_pdcluster_io_cluster": "chat",
    "__meta_kubernetes_pod_label_pdcluster_io_role": "decode",
    "__meta_kubernetes_pod_label_pdcluster_io_pool": "cpu",
    "__meta_kubernetes_pod_label_pdcluster_io_revision": "3d32280a",
}
LABELS = {
    "namespace": "models",
    "pod": "chat-decode-cpu-0",
    "pdcluster": "chat",
    "role": "decode",
    "pool": "cpu",
    "revision": "3d32280a",
}


@needs_promtool
@pytest.mark.parametrize(
    ("pod", "found"),
    [
        (POD, [LABELS]),
        ({**POD, "__meta_kubernetes_pod_container_port_name": "kv"}, []),
        ({name: POD[name] for name in POD if "label" not in name}, []),  # another one's pod
    ],
)
def test_prometheus_takes_workers_at_their_http_port_alone(
    pod: dict[str, str], found: list[dict[str, str]], tmp_path: Path
) -> None:
    """With targets of a file: Debian's Prometheus is built without a search of Kubernetes."""
    (tmp_path / "pods.json").write_text(json.dumps([{"targets": ["a:8000"], "labels": pod}]))
    search = {"file_sd_configs": [{"files": [str(tmp_path / "pods.json")]}]}
    scrapes = [
        {name: each[name] for name in each if name != "kubernetes_sd_configs"} | search
        for each in (WORKERS, OPERATOR)
    ]
    file = tmp_path / "prometheus.yaml"
    file.write_text(json.dumps({"scrape_configs": scrapes}))
    checked = promtool("check", "service-discovery", "--timeout=2s", file, WORKERS["job_name"])

    assert checked.returncode == 0, checked.stdout + checked.stderr
    kept = [each["labels"] for each in json.loads(checked.stdout) if each["labels"]]
    assert [{name: each[name] for name in LABELS} for each in kept] == found


def test_series_have_the_labels_that_they_have_by_the_chart() -> None:
    made = render({"monitoring": {"podMonitors": True}})
    (workers,), (operator,) = (
        named(made, "PodMonitor", f"{RELEASE}-pdcluster{suffix}")["spec"]["podMetricsEndpoints"]
        for suffix in ("-workers", "")
    )
    relabeled = {each["targetLabel"]: each["sourceLabels"] for each in workers["relabelings"]}

    assert labels(WORKERS) == {**OF_THE_OPERATOR_OF_PROMETHEUS, **relabeled}
    assert labels(OPERATOR) == OF_THE_OPERATOR_OF_PROMETHEUS
    assert OPERATOR["honor_labels"] is operator["honorLabels"] is True


def test_what_is_received_is_exported() -> None:
    (pipeline,) = COLLECTOR["service"]["pipelines"].values()

    assert pipeline == {
        "receivers": list(COLLECTOR["receivers"]),
        "exporters": list(COLLECTOR["exporters"]),
    }
