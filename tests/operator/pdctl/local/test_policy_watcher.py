"""Edits of the PDCluster file while it runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_api.manifests.worker_config import policy_file
from pdcluster_schema.load import load, parse
from pdctl.local.policy import PolicyWatcher, restart_fields

Write = Callable[[dict[str, Any]], Path]


@pytest.fixture
def watched(
    document: dict[str, Any], write_document: Write, tmp_path: Path
) -> tuple[PolicyWatcher, Path, list[str]]:
    """A watcher of the document's file that has looked once, its policy file, and what it says."""
    source, target, said = write_document(document), tmp_path / "policy.yaml", []
    cluster = load(source)
    target.write_text(yaml.safe_dump(policy_file(cluster)))
    watcher = PolicyWatcher(source, cluster, target, said.append)
    watcher.poll()
    return watcher, target, said


def threshold(target: Path) -> int:
    value: int = yaml.safe_load(target.read_text())["offload"]["prefillLengthThreshold"]
    return value


def test_policy_edit_reaches_the_workers(
    watched: tuple[PolicyWatcher, Path, list[str]], document: dict[str, Any], write_document: Write
) -> None:
    watcher, target, said = watched
    document["spec"]["routing"] = {"offload": {"prefillLengthThreshold": 7}}
    write_document(document)
    watcher.poll()
    watcher.poll()

    assert threshold(target) == 7
    assert said == ["policy updated"]


def test_a_shared_prefix_cache_is_policy_too(
    watched: tuple[PolicyWatcher, Path, list[str]], document: dict[str, Any], write_document: Write
) -> None:
    watcher, target, said = watched
    document["spec"].setdefault("service", {})["sharedPrefixCache"] = True
    write_document(document)
    watcher.poll()

    assert yaml.safe_load(target.read_text())["sharedPrefixCache"] is True
    assert said == ["policy updated"]


def test_an_edit_of_the_callers_of_the_api_and_of_its_limits_is_taken(
    watched: tuple[PolicyWatcher, Path, list[str]], document: dict[str, Any], write_document: Write
) -> None:
    watcher, target, said = watched
    document["spec"].setdefault("service", {}).update(
        cors={"allowedOrigins": ["http://localhost:3000"]}, limits={"maxHeaders": 64}
    )
    write_document(document)
    watcher.poll()
    policy = yaml.safe_load(target.read_text())

    assert (policy["cors"]["allowedOrigins"], policy["httpLimits"]["maxHeaders"]) == (
        ["http://localhost:3000"],
        64,
    )
    assert said == ["policy updated"]


def test_bad_edit_is_refused_once_and_a_good_one_taken_after(
    watched: tuple[PolicyWatcher, Path, list[str]], document: dict[str, Any], write_document: Write
) -> None:
    watcher, target, said = watched
    document["spec"]["routing"] = {"offload": {"prefillLengthThreshold": -1, "prefilQueueMax": 3}}
    write_document(document)
    watcher.poll()
    watcher.poll()

    assert threshold(target) == 256
    assert said == [
        "edit refused, the last good policy stays:\n"
        "    spec.routing.offload.prefillLengthThreshold: must be at least 0, not -1; raise it\n"
        "    spec.routing.offload.prefilQueueMax: unknown field; did you mean prefillQueueMax?"
    ]

    document["spec"]["routing"] = {"offload": {"prefillLengthThreshold": 70000}}
    write_document(document)
    watcher.poll()

    assert threshold(target) == 70000


def test_engine_edit_is_refused_whole(
    watched: tuple[PolicyWatcher, Path, list[str]], document: dict[str, Any], write_document: Write
) -> None:
    watcher, target, said = watched
    document["spec"] |= {
        "routing": {"offload": {"prefillLengthThreshold": 7}},
        "engine": {"maxBatchedTokens": 512},
    }
    write_document(document)
    watcher.poll()

    assert threshold(target) == 256
    assert said == [
        "edit refused, the last good policy stays: spec.engine.maxBatchedTokens changed; restart "
        "to apply"
    ]


def test_edit_that_cannot_be_written_is_reported_and_the_next_one_taken(
    document: dict[str, Any], write_document: Write, tmp_path: Path
) -> None:
    before, folder, said = parse(document), tmp_path / "run", list[str]()
    document["spec"]["qos"] = {"admission": {"maxQueuedRequests": 5}}
    watcher = PolicyWatcher(write_document(document), before, folder / "policy.yaml", said.append)
    watcher.poll()

    assert len(said) == 1
    assert said[0].startswith("edit not taken, the last good policy stays: FileNotFoundError: ")
    folder.mkdir()
    document["spec"]["qos"] = {"admission": {"maxQueuedRequests": 50}}
    write_document(document)
    watcher.poll()
    assert said[1:] == ["policy updated"]


def test_missing_and_unchanged_files_are_no_edits(
    watched: tuple[PolicyWatcher, Path, list[str]], document: dict[str, Any]
) -> None:
    watcher, target, said = watched
    source = target.with_name("cluster.yaml")
    source.unlink()
    watcher.poll()
    source.write_text("# the same, in other words\n" + yaml.safe_dump(document))
    watcher.poll()

    assert said == []
    assert threshold(target) == 256


def test_edit_between_load_and_watch_is_found(
    document: dict[str, Any], write_document: Write, tmp_path: Path
) -> None:
    before = parse(document)
    document["spec"]["qos"] = {"admission": {"maxQueuedRequests": 5}}
    said: list[str] = []
    watcher = PolicyWatcher(write_document(document), before, tmp_path / "policy.yaml", said.append)
    watcher.poll()

    assert said == ["policy updated"]


def test_an_edit_of_the_autoscaler_is_no_reason_to_refuse_and_is_said_to_do_nothing(
    watched: tuple[PolicyWatcher, Path, list[str]], document: dict[str, Any], write_document: Write
) -> None:
    watcher, target, said = watched
    document["spec"]["routing"] = {"offload": {"prefillLengthThreshold": 7}}
    document["spec"]["autoscale"] = {"mode": "On", "budget": {"total": 4}}
    write_document(document)
    watcher.poll()
    document["spec"]["autoscale"] = {"mode": "Off"}
    write_document(document)
    watcher.poll()

    assert threshold(target) == 7
    assert [text.partition(",")[0] for text in said] == ["policy updated", "autoscale.mode is On"]


def test_new_floor_of_transfers_counts_without_a_restart(
    document: dict[str, Any], write_document: Write, tmp_path: Path
) -> None:
    before, on_change = parse(document), list[float | None]()
    document["spec"]["placement"] = {"minTransferGBps": 2.5}

    def take() -> None:
        placement = watcher.cluster.spec.placement
        on_change.append(placement and placement.min_transfer_gbps)

    target, said = tmp_path / "policy.yaml", list[str]()
    watcher = PolicyWatcher(write_document(document), before, target, said.append, on_change=take)
    watcher.poll()
    watcher.poll()

    assert (on_change, said) == ([2.5], [])


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("spec", "service"), {"port": 9}, ["spec.service.port"]),
        (("spec", "engine"), {"blockSize": 16}, []),
        (
            ("spec", "roles", "prefill", "engine"),
            {"maxBatchedTokens": 256},
            ["spec.roles.prefill.engine.maxBatchedTokens"],
        ),
        (
            ("spec", "roles", "decode", "pools"),
            [{"name": "cpu", "replicas": 2}],
            ["spec.roles.decode.pools"],
        ),
        (("metadata", "name"), "other", ["metadata.name"]),
        (("metadata", "labels"), {"team": "chat"}, []),
        (("spec", "autoscale"), {"mode": "On", "budget": {"total": 4}}, []),
    ],
)
def test_restart_fields_are_those_outside_policy(
    path: tuple[str, ...], value: Any, expected: list[str], document: dict[str, Any]
) -> None:
    before = parse(document)
    section = document
    for part in path[:-1]:
        section = section[part]
    section[path[-1]] = value

    assert restart_fields(before, parse(document)) == expected
