"""docs/contracts.md has every metric of a worker, with its type and labels, and no other."""

import re
from pathlib import Path

from pdcluster_worker.metrics import Metrics

PAGE = (Path(__file__).parents[2] / "docs" / "contracts.md").read_text()

Described = dict[str, tuple[str, tuple[str, ...]]]
"""Type and labels of each name without its prefix."""


def of_the_page() -> Described:
    """Every row of the section's tables; the first cell of a heading is the type of its rows."""
    section = PAGE.partition("\n## A worker's metrics\n")[2]
    found: Described = {}
    kind = ""
    for first, second in re.findall(r"^\| ([^|]*) \| ([^|]*)\|", section, re.MULTILINE):
        kind = kind if "`" in first or "-" in first else first
        for name in re.findall(r"`(\w+)`", first):
            found[name] = (kind, tuple(re.findall(r"\w+", second)))
    return found


def of_the_worker() -> Described:
    metrics = Metrics()
    found: Described = {}
    for family in metrics.registry.collect():
        name = family.name.removeprefix("pdcluster_")
        found[name] = (family.type, getattr(getattr(metrics, name, family), "_labelnames", ()))
    return found


def test_page_has_every_metric_of_a_worker_and_no_other() -> None:
    assert of_the_page() == of_the_worker()
