"""The files of Prometheus for one run, and Debian's Prometheus itself for `pdctl up --observe`.

The labels of the series are those that the chart's PodMonitor gives them.
"""

import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import yaml

from pdcluster_api.errors import StartError
from pdcluster_schema.pdcluster import PDCluster
from pdctl.local.machine import free_port
from pdctl.local.processes import Launch, running
from pdctl.local.run_directory import LOOPBACK, RunDirectory, replace_file, write_yaml
from pdctl.local.watcher import Row

CONFIG, RULES, TARGETS = "prometheus.yaml", "alerts.yaml", "workers.json"

_OF_AN_OPERATOR = frozenset({"PDClusterOperatorSilent"})  # there is none here

_LIMITS = ("--storage.tsdb.retention.time=1d", "--storage.tsdb.retention.size=256MB")


@asynccontextmanager
async def observing(
    run: RunDirectory, echo: Callable[[str], None], *, starts: bool
) -> AsyncIterator[None]:
    """Write the scrape config; with `starts` Prometheus runs by it.  Raises StartError."""
    write_yaml(run.prometheus / CONFIG, _config())
    write_yaml(run.prometheus / RULES, _rules())
    if not starts:
        yield
        return
    address = f"{LOOPBACK}:{free_port()}"
    launch = Launch(
        "prometheus",
        (
            find_prometheus(),
            f"--config.file={run.prometheus / CONFIG}",
            f"--storage.tsdb.path={run.prometheus / 'data'}",
            f"--web.listen-address={address}",
            *_LIMITS,
        ),
        run.logs / "prometheus.log",
    )
    async with running(launch, echo):
        echo(f"prometheus: http://{address}, its alerts at http://{address}/alerts")
        yield


def find_prometheus() -> str:
    """Raises StartError where it is not installed."""
    found = shutil.which("prometheus")
    if found is None:
        raise StartError(
            "--observe: there is no prometheus on the PATH; install it (Debian: apt-get install "
            "prometheus), or leave --observe out",
            exit_code=2,
        )
    return found


def write_targets(
    run: RunDirectory, cluster: PDCluster, revision: str, rows: Sequence[Row]
) -> None:
    """Prometheus reads them again by itself; a worker has an address once it is registered."""
    targets = [
        {
            "targets": [row.addresses["http"]],
            "labels": {
                "namespace": cluster.metadata.namespace,
                "pdcluster": cluster.metadata.name,
                "pod": row.name,
                "role": row.role,
                "pool": row.pool,
                "revision": revision,
            },
        }
        for row in rows
        if "http" in row.addresses
    ]
    replace_file(run.prometheus / TARGETS, json.dumps(targets, indent=2) + "\n")


def _config() -> dict[str, Any]:
    """With paths beside the file."""
    return {
        "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
        "rule_files": [RULES],
        "scrape_configs": [{"job_name": "pdcluster", "file_sd_configs": [{"files": [TARGETS]}]}],
    }


def _rules() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(
        files("pdctl.local").joinpath(RULES).read_text(encoding="utf-8")
    )
    for group in content["groups"]:
        group["rules"] = [
            rule for rule in group["rules"] if rule.get("alert") not in _OF_AN_OPERATOR
        ]
    return content
