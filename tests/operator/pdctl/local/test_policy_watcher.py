"""Edits of the PDCluster file while it runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_api.manifests.worker_config import policy_file
from pdcluster_schema.load import load, parse
from pdctl.local.policy import PolicyWatcher, restart_fields
from tests.schema.object_cases import at


class Edited:
    """A document's file and its watcher, which has looked once."""

    def __init__(self, document: dict[str, Any], write: Callable[..., Path], target: Path) -> None:
        self.document, self._write = document, write
        self.target, self.reports = target, list[str]()
        self.source = write(document)
        cluster = load(self.source)
        target.write_text(yaml.safe_dump(policy_file(cluster)))
        self.watcher = PolicyWatcher(self.source, cluster, target, self.reports.append)
        self.watcher.poll()

    def edit(self, changes: dict[str, Any]) -> None:
        for path, value in changes.items():
            at(f"spec.{path}", value)(self.document)
        self._write(self.document)
        self.watcher.poll()

    def policy(self) -> Any:
        return yaml.safe_load(self.target.read_text())

    def threshold(self) -> int:
        value: int = self.policy()["offload"]["prefillLengthThreshold"]
        return value


THRESHOLD = "routing.offload.prefillLengthThreshold"


@pytest.fixture
def edited(document: dict[str, Any], write_document: Callable[..., Path], tmp_path: Path) -> Edited:
    return Edited(document, write_document, tmp_path / "policy.yaml")


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        (THRESHOLD, 7, "offload.prefillLengthThreshold"),
        ("service.sharedPrefixCache", True, "sharedPrefixCache"),
        ("service.cors.allowedOrigins", ["http://localhost:3000"], "cors.allowedOrigins"),
        ("service.limits.maxHeaders", 64, "httpLimits.maxHeaders"),
    ],
)
def test_policy_edit_reaches_the_workers(edited: Edited, path: str, value: Any, place: str) -> None:
    edited.edit({path: value})
    edited.watcher.poll()
    found = edited.policy()
    for part in place.split("."):
        found = found[part]

    assert found == value
    assert edited.reports == ["policy updated"]


def test_bad_edit_is_refused_once_and_a_good_one_taken_after(edited: Edited) -> None:
    edited.edit({THRESHOLD: -1, "routing.offload.prefilQueueMax": 3})
    edited.watcher.poll()

    assert edited.threshold() == 256
    (report,) = edited.reports
    first, *faults = report.splitlines()
    assert first == "edit refused, the last good policy stays:"
    assert [re.sub(r"line \d+", "line N", line).split(": ")[:2] for line in faults] == [
        ["    line N", "spec.routing.offload.prefillLengthThreshold"],
        ["    line N", "spec.routing.offload.prefilQueueMax"],
    ]

    edited.edit({"routing.offload": {"prefillLengthThreshold": 70000}})
    assert edited.threshold() == 70000


def test_engine_edit_is_refused_whole(edited: Edited) -> None:
    edited.edit({THRESHOLD: 7, "engine": {"maxBatchedTokens": 512}})

    assert edited.threshold() == 256
    assert [report.partition(": ")[2] for report in edited.reports] == [
        "spec.engine.maxBatchedTokens changed; restart to apply"
    ]


def test_edit_that_cannot_be_written_is_reported_and_the_next_one_taken(
    document: dict[str, Any], write_document: Callable[..., Path], tmp_path: Path
) -> None:
    before, folder, reports = parse(document), tmp_path / "run", list[str]()
    at("spec.qos.admission.maxQueuedRequests", 5)(document)
    source = write_document(document)
    watcher = PolicyWatcher(source, before, folder / "policy.yaml", reports.append)
    watcher.poll()

    (report,) = reports
    assert report.startswith("edit not taken, the last good policy stays: FileNotFoundError: ")
    folder.mkdir()
    at("spec.qos.admission.maxQueuedRequests", 50)(document)
    write_document(document)
    watcher.poll()
    assert reports[1:] == ["policy updated"]


def test_missing_and_unchanged_files_are_no_edits(edited: Edited) -> None:
    text = edited.source.read_text()
    edited.source.unlink()
    edited.watcher.poll()
    edited.source.write_text("# the same, in other words\n" + text)
    edited.watcher.poll()

    assert edited.reports == []


def test_edit_between_load_and_watch_is_found(
    document: dict[str, Any], write_document: Callable[..., Path], tmp_path: Path
) -> None:
    before, reports = parse(document), list[str]()
    at("spec.qos.admission.maxQueuedRequests", 5)(document)
    source = write_document(document)
    PolicyWatcher(source, before, tmp_path / "policy.yaml", reports.append).poll()

    assert reports == ["policy updated"]


def test_an_edit_of_the_autoscaler_is_taken_with_a_remark(edited: Edited) -> None:
    edited.edit({THRESHOLD: 7, "autoscale": {"mode": "On", "budget": {"total": 4}}})
    edited.edit({"autoscale": {"mode": "Off"}})

    assert edited.threshold() == 7
    assert [report.partition(",")[0] for report in edited.reports] == [
        "policy updated",
        "autoscale.mode is On",
    ]


def test_new_floor_of_transfers_counts_without_a_restart(
    document: dict[str, Any], write_document: Callable[..., Path], tmp_path: Path
) -> None:
    before, floors, reports = parse(document), list[float | None](), list[str]()
    at("spec.placement.minTransferGBps", 2.5)(document)

    def on_change() -> None:
        placement = watcher.cluster.spec.placement
        floors.append(placement and placement.min_transfer_gbps)

    source, target = write_document(document), tmp_path / "policy.yaml"
    watcher = PolicyWatcher(source, before, target, reports.append, on_change=on_change)
    watcher.poll()
    watcher.poll()

    assert (floors, reports) == ([2.5], [])


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("spec.service", {"port": 9}, ["spec.service.port"]),
        ("spec.engine", {"blockSize": 16}, []),
        (
            "spec.roles.prefill.engine",
            {"maxBatchedTokens": 256},
            ["spec.roles.prefill.engine.maxBatchedTokens"],
        ),
        (
            "spec.roles.decode.pools",
            [{"name": "cpu", "replicas": 2}],
            ["spec.roles.decode.pools"],
        ),
        ("metadata.name", "other", ["metadata.name"]),
        ("metadata.labels", {"team": "chat"}, []),
        ("spec.autoscale", {"mode": "On", "budget": {"total": 4}}, []),
    ],
)
def test_restart_fields_are_those_outside_policy(
    path: str, value: Any, expected: list[str], document: dict[str, Any]
) -> None:
    before = parse(document)
    at(path, value)(document)

    assert restart_fields(before, parse(document)) == expected
