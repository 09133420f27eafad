"""Queries of the dashboard by a real Prometheus: it takes all of them, and those of capacity and
cost are evaluated over a few series of two PDClusters.
"""

import json
from pathlib import Path

import pytest

from tests.chart.helm_chart import CHART
from tests.contract.prometheus_rules import check_values, needs_promtool, promtool, series

pytestmark = needs_promtool

CAPACITY = "pdcluster_operator_accelerators"
PRICE = "pdcluster_operator_accelerator_price_per_hour"
TOKENS = 'pdcluster_generation_tokens_total{pod="a"} 500'
SIZES = "\n".join(
    f'{CAPACITY}{{role="{role}",pool="{pool}",gpu="{gpu}",state="{state}",pod="{pod}"}} {number}'
    for pod in ("o-1", "o-2")  # both operators, around a change of the leader
    for role, pool, gpu, desired, ready in (
        ("prefill", "b200", "B200", 8, 8),
        ("decode", "b300", "B300", 16, 12),
        ("decode", "h100", "H100", 4, 4),
    )
    for state, number in (("desired", desired), ("ready", ready))
)
PRICES = f'{PRICE}{{gpu="B200",pod="o-1"}} 5.0\n{PRICE}{{gpu="B300",pod="o-1"}} 6.5'
COST = 8 * 5.0 + 16 * 6.5


BOARD = json.loads((CHART / "monitoring" / "dashboard.json").read_text())
VARIABLES = {
    "$namespace": "models",
    "$pdcluster": "chat",
    "$__rate_interval": "5m",
    "$__range": "1h",
}


def filled(expression: str) -> str:
    """For the PDCluster `chat` of the namespace `models`."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def expressions(title: str) -> list[str]:
    """PromQL of a panel."""
    (panel,) = [each for each in BOARD["panels"] if each["title"] == title]
    return [filled(target["expr"]) for target in panel["targets"]]


def test_prometheus_takes_every_query(tmp_path: Path) -> None:
    """That each is about metrics that exist is in test_monitoring."""
    panels = [each for one in BOARD["panels"] for each in (one, *one.get("panels", ()))]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    queries += [each["expr"] for each in BOARD["annotations"]["list"]]
    rules = [{"record": f"query:{i}", "expr": filled(each)} for i, each in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    found = promtool("check", "rules", "--lint=none", file)

    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{len(queries)} rules found" in found.stdout
    assert len(queries) > 100


@pytest.mark.parametrize(
    ("data", "sums"),
    [
        (f"{SIZES}\n{PRICES}\n{TOKENS}", (24.0, 28.0, COST, COST / 500 / 3600 * 1e6)),
        (f"{SIZES}\n{PRICES}\n{TOKENS[:-3]}0", (24.0, 28.0, COST, None)),  # no answers
        (f"{SIZES}\n{TOKENS}", (24.0, 28.0, None, None)),  # no prices
        (TOKENS, (None, None, None, None)),
    ],
)
def test_capacity_and_cost_are_of_the_chosen_pdcluster(
    tmp_path: Path, data: str, sums: tuple[float | None, ...]
) -> None:
    titles = ("Accelerators", "Cost per hour", "Cost per million output tokens")
    shown = [expression for title in titles for expression in expressions(title)]
    wanted = [
        []
        if value is None
        else [(expression if expression.startswith("namespace_") else "{}", value)]
        for expression, value in zip(shown, sums, strict=True)
    ]
    both = [
        *series(data, namespace="models", pdcluster="chat"),
        *series(f"{SIZES}\n{PRICES}\n{TOKENS}", namespace="models", pdcluster="other"),
    ]

    check_values(tmp_path, both, dict(zip(shown, wanted, strict=True)))
