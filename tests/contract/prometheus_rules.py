"""Rules of the chart over a few series by a real Prometheus: `promtool test rules`."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.chart.helm_chart import CHART

RULES_FILE = CHART / "monitoring" / "alerts.yaml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is of Debian's package prometheus: make promtool"
)

_COUNTERS = ("_total", "_count", "_sum", "_bucket")
_MINUTES = 120  # longer than any `for` and window
_FIRING = 'count by (alertname, namespace, pdcluster) (ALERTS{alertstate="firing"})'

Raised = Mapping[str, Iterable[tuple[str, str]]]
"""Namespace and PDCluster ("" = none) of each alert that is raised, by its name."""


def series(text: str, **labels: str) -> list[dict[str, str]]:
    """Series from lines like `name{label="value"} 1.5`, each with these labels too.

    The number is the value of a gauge, or the increase per second of a counter.
    """
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
        assert match is not None, line
        given = {**dict(re.findall(r'(\w+)="([^"]*)"', match[2] or "")), **labels}
        words = ",".join(f"{name}={json.dumps(value)}" for name, value in given.items())
        number = float(match[3])
        step = 60 * number if match[1].endswith(_COUNTERS) else 0.0
        first = 0.0 if step else number
        found.append(
            {"series": f"{match[1]}{{{words}}}", "values": f"{first!r}+{step!r}x{_MINUTES}"}
        )
    return found


def check_raised(folder: Path, data: list[dict[str, str]], raised: Raised) -> None:
    """Fails unless Prometheus raises these alerts and no others, by the end of two hours."""
    _check(folder, data, raised, _MINUTES)


def check_waits(folder: Path, data: list[dict[str, str]], minutes: float) -> None:
    """Fails if an alert is raised before it was due for so long."""
    _check(folder, data, {}, minutes)


def _check(folder: Path, data: list[dict[str, str]], raised: Raised, minutes: float) -> None:
    samples = [
        {"labels": _labels(alertname=alert, namespace=namespace, pdcluster=name), "value": 1}
        for alert, clusters in raised.items()
        for namespace, name in clusters
    ]
    query = {"expr": _FIRING, "eval_time": f"{minutes:g}m", "exp_samples": samples}
    _run(folder, data, [query])


def _run(folder: Path, data: list[dict[str, str]], queries: list[dict[str, Any]]) -> None:
    test = {"interval": "1m", "input_series": data, "promql_expr_test": queries}
    content = {"rule_files": [str(RULES_FILE)], "evaluation_interval": "1m", "tests": [test]}
    file = folder / "test.yaml"
    file.write_text(json.dumps(content))
    found = promtool("test", "rules", file)
    assert found.returncode == 0, found.stdout + found.stderr


def check_values(
    folder: Path,
    data: list[dict[str, str]],
    expressions: Mapping[str, Iterable[tuple[str, float]]],
) -> None:
    """Fails unless each expression has these series, labels and values, after two hours."""
    _run(
        folder,
        data,
        [
            {
                "expr": expression,
                "eval_time": f"{_MINUTES}m",
                "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
            }
            for expression, samples in expressions.items()
        ],
    )


def _labels(**labels: str) -> str:
    given = ", ".join(f'{name}="{value}"' for name, value in labels.items() if value)
    return f"{{{given}}}"


def promtool(*arguments: Any) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *map(str, arguments)], capture_output=True, text=True, check=False
    )
