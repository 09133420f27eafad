"""Every rule of the chart and every query of its dashboard over a running 1p1d that answers:
`pdctl up --observe`, with real workers and a real Prometheus.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chart.helm_chart import CHART
from tests.chat_model import chat_model
from tests.system.pdctl import START_SECONDS, up
from tests.system.waiting import wait_for

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Debian's package prometheus: make promtool"
)

CHAT = CHART.parents[1] / "examples" / "chat.yaml"
OF_AN_OPERATOR = {
    "namespace_pdcluster_role_pool_gpu_state:pdcluster_operator_accelerators:max",
    "namespace_pdcluster:pdcluster_cost_per_hour:sum",
    *("Ready", "Accelerators", "Cost per hour", "Cost per million output tokens"),
}
"""Recordings and figures of the overview that are empty without one."""
VARIABLES = {
    "$namespace": "default",
    "$pdcluster": "chat",
    "$__rate_interval": "1m",
    "$__range": "1h",
}


class Prometheus:
    def __init__(self, address: str) -> None:
        self._address = address

    def rules(self) -> list[dict[str, Any]]:
        groups = self._get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def series(self, expression: str) -> list[Any]:
        """Fails where it cannot be evaluated."""
        found: list[Any] = self._get("query", query=expression)["result"]
        return found

    def _get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self._address}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus of workers that have answered prompts, prefilled remotely and locally."""
    chat_model()
    folder = tmp_path_factory.mktemp("observed")
    with up(
        *(str(CHAT), "--observe", "--state-dir", str(folder / "state")),
        output=folder / "output",
        environment=os.environ,
    ) as address:
        (found,) = re.findall(r"^prometheus: (http\S+),", (folder / "output").read_text(), re.M)
        prometheus = Prometheus(found)

        def answered() -> bool:
            for prefill in ("remote", "local"):
                _ask(address, prefill)
            return all(prometheus.series(name) for name in _records(prometheus) - OF_AN_OPERATOR)

        wait_for(answered, START_SECONDS, lambda: str(_empty(prometheus)), poll_seconds=2.0)
        yield prometheus


def test_every_rule_is_evaluated_without_an_error_and_those_of_workers_have_data(
    prometheus: Prometheus,
) -> None:
    rules = prometheus.rules()

    assert {(rule["health"], rule.get("lastError")) for rule in rules} == {("ok", None)}
    assert _empty(prometheus) == _records(prometheus) & OF_AN_OPERATOR


def test_every_query_of_the_dashboard_is_evaluated_and_its_overview_has_data(
    prometheus: Prometheus,
) -> None:
    board = json.loads((CHART / "monitoring" / "dashboard.json").read_text())
    panels = [each for one in board["panels"] for each in (one, *one.get("panels", ()))]
    found = {
        panel["title"]: [prometheus.series(_filled(each["expr"])) for each in panel["targets"]]
        for panel in panels
        if panel["type"] != "row"
    }
    overview = {panel["title"] for panel in board["panels"] if panel["type"] == "stat"}

    assert {name for name in overview if not any(found[name])} == overview & OF_AN_OPERATOR
    assert sum(any(series) for series in found.values()) > len(found) / 2


def _ask(address: str, prefill: str) -> None:
    words = f"{os.urandom(8).hex()}: which river runs through which city of Europe, and where to? "
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": words * 4}],
        "max_tokens": 4,
        "pdcluster": {"prefill": prefill},
    }
    url = f"{address}/v1/chat/completions"
    httpx.post(url, json=body, timeout=START_SECONDS).raise_for_status()


def _records(prometheus: Prometheus) -> set[str]:
    return {rule["name"] for rule in prometheus.rules() if rule["type"] == "recording"}


def _empty(prometheus: Prometheus) -> set[str]:
    return {name for name in _records(prometheus) if not prometheus.series(name)}


def _filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression
