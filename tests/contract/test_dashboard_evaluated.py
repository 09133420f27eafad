"""Capacity and cost of the dashboard, by a real Prometheus over a few series of two PDClusters."""

import json
from pathlib import Path

import pytest

from tests.chart.helm_chart import CHART
from tests.contract.prometheus_rules import check_values, needs_promtool, series

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


def expressions(title: str) -> list[str]:
    """PromQL of a panel for the PDCluster `chat` of the namespace `models`."""
    board = json.loads((CHART / "monitoring" / "dashboard.json").read_text())
    (panel,) = [each for each in board["panels"] if each["title"] == title]
    chosen = {"$namespace": "models", "$pdcluster": "chat", "$__rate_interval": "5m"}
    found = [target["expr"] for target in panel["targets"]]
    for name, value in chosen.items():
        found = [expression.replace(name, value) for expression in found]
    return found


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
    both = [
        *series(data, namespace="models", pdcluster="chat"),
        *series(f"{SIZES}\n{PRICES}\n{TOKENS}", namespace="models", pdcluster="other"),
    ]

    check_values(tmp_path, both, dict(zip(shown, sums, strict=True)))
