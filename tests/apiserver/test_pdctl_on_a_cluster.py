"""`pdctl why`, `plan` and `verify` ask the real API server, as the user of a kubeconfig."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pdcluster_api.plan.autoscale.explain import remembered
from pdcluster_api.plan.observed.state import DecisionInput, DecisionStep, ScalingDecision
from pdcluster_schema import labels
from pdcluster_schema.load import parse
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import WorkloadId
from pdctl.cli.main import app
from tests.apiserver.cluster_objects import ingress_service, scaler, stateful_set
from tests.apiserver.control_plane import ControlPlane, binary
from tests.apiserver.objects import Json, Objects
from tests.schema.object_cases import Change, at, minimal

DECISION = ScalingDecision(
    {("prefill", "cpu"): 1, ("decode", "cpu"): 2},
    (DecisionInput("decode", "num_requests_waiting", 20.0, 16.0),),
    (DecisionStep("pool", "decode/cpu", 1, 2, "the cheapest pool that has capacity"),),
)


@pytest.fixture
def pdctl(control_plane: ControlPlane, namespace: str) -> Callable[..., Any]:
    """Run it as the administrator, in this test's namespace."""
    options = ("--kubeconfig", str(control_plane.kubeconfig), "--namespace", namespace)
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments), *options])


def written(folder: Path, *changes: Change) -> Path:
    document = minimal()
    for change in changes:
        change(document)
    path = folder / "new.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def running(
    plane: ControlPlane, clusters: Objects, namespace: str, change: Change = lambda document: None
) -> None:
    """A PDCluster with the decode pool's StatefulSet and its scaler, which was scaled to 3."""
    document = minimal()
    change(document)
    owner = clusters.create(document).content
    revision = revision_of(parse(owner).spec)
    name = WorkloadId("chat", "decode", "cpu", revision).name
    body = stateful_set(owner, replicas=3)
    body["metadata"] = {
        **body["metadata"],
        "name": name,
        "labels": labels.workload_labels("chat", "decode", "cpu", revision),
    }
    for each in (body, ingress_service(owner, revision), scaler(owner, replicas=3)):
        plane.kubectl("create", "--namespace", namespace, "-f", "-", input=yaml.safe_dump(each))


def test_why_shows_the_decision_of_the_object(pdctl: Callable[..., Any], clusters: Objects):
    document = minimal()
    at("spec.autoscale", {"mode": "On", "budget": {"total": 8}})(document)
    clusters.create(document)
    none = pdctl("why", "chat")
    entries = remembered(None, replace(DECISION, at=datetime(2026, 3, 4, tzinfo=UTC)))
    sizes = [
        {"role": role, "pool": pool, "replicas": number}
        for (role, pool), number in DECISION.replicas.items()
    ]
    pool = {"name": "cpu", "gpu": "cpu", "desired": 2, "current": 1, "ready": 1, "updated": 1}
    status = {
        "roles": [{"name": "decode", "desired": 2, "ready": 1, "pools": [pool]}],
        "autoscaling": {
            "mode": "On",
            "replicas": sizes,
            "lastDecisions": [{**entries[0], "mode": "On"}],
        },
    }
    answer = clusters.merge("chat", {"status": status}, "status")
    assert answer.accepted, answer.content

    shown = pdctl("why", "chat")

    assert (none.exit_code, "chat has no decision yet" in none.stderr) == (1, True)
    assert shown.exit_code == 0, shown.stderr
    lines = shown.output.splitlines()
    assert lines[0] == "chat, autoscale.mode On"
    assert lines[2].split() == [
        "decode/cpu",
        "2",
        "2",
        "1",
        "1",
        "0",
        "to",
        "1024",
        "03-04",
        "00:00:00:",
        "1",
        "to",
        "2",
        "(below)",
    ]
    assert "chat, 2026-03-04 00:00:00 UTC, carried out: decode/cpu 1 to 2" in lines
    assert "num_requests_waiting 20, threshold 16" in shown.output


def test_verify_annotates_the_object_and_shows_the_answer(
    pdctl: Callable[..., Any], clusters: Objects
):
    clusters.create(minimal())
    old = outcome("2026-01-02T03:04:05Z", "old")
    answer = clusters.merge("chat", {"status": old}, "status")
    assert answer.accepted, answer.content
    with ThreadPoolExecutor() as threads:
        running = threads.submit(pdctl, "verify", "chat")
        deadline = time.monotonic() + 60.0
        while not (request := annotation(clusters)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not running.done()
        clusters.merge("chat", {"status": outcome("2026-01-02T03:05:05Z", request)}, "status")
        result = running.result(60.0)

    assert result.exit_code == 1, result.stderr
    assert result.output.splitlines() == [
        "PREFILL  DECODE  RESULT   TRANSPORT  MOVED  RATE  TOKENS  WORKERS",
        "cpu      cpu     damaged  tcp         1 kB     -       -  p-0 to d-0",
        "kv transfer verified: False (BlocksDamaged): checksums differ",
    ]


def annotation(clusters: Objects) -> str:
    return clusters.get("chat")["metadata"].get("annotations", {}).get(labels.VERIFY, "")


def outcome(at: str, request: str) -> Json:
    """Status of a pair whose blocks were damaged, as the operator writes it."""
    pair = {
        "prefill": "cpu",
        "decode": "cpu",
        "at": at,
        "request": request,
        "fault": "damaged",
        "message": "checksums differ",
        "prefillWorker": "p-0",
        "decodeWorker": "d-0",
        "transport": "tcp",
        "numBytes": 1000,
        "numFailures": 1,
    }
    condition = {
        "type": "KVTransferVerified",
        "status": "False",
        "reason": "BlocksDamaged",
        "message": "checksums differ",
        "lastTransitionTime": at,
    }
    return {"transfers": {"revision": "0a1b2c3d", "pairs": [pair]}, "conditions": [condition]}


def test_verify_of_an_object_that_is_not_there_or_has_mixed_workers(
    pdctl: Callable[..., Any], clusters: Objects, namespace: str
):
    none = pdctl("verify", "talk")
    mixed = minimal()
    mixed["spec"]["roles"] = {"mixed": mixed["spec"]["roles"]["decode"]}
    answer = clusters.create(mixed)
    assert answer.accepted, answer.content

    assert (none.exit_code, none.stderr) == (
        2,
        f"error: there is no PDCluster talk in namespace {namespace}, and none runs here\n",
    )
    assert "PDCluster chat has no prefill workers" in pdctl("verify", "chat").stderr


def test_an_object_that_is_not_there_is_named_with_its_namespace(
    pdctl: Callable[..., Any], namespace: str
):
    result = pdctl("why", "talk")

    assert result.exit_code == 1
    assert result.stderr == (
        f"error: no PDCluster talk in namespace {namespace}; `kubectl get pdc -A` lists all, -n "
        "names another namespace\n"
    )


def test_a_missing_right_is_reported(control_plane: ControlPlane, namespace: str):
    kubeconfig = control_plane.kubeconfig_for("no-rights")
    result = CliRunner().invoke(
        app, ["why", "chat", "--kubeconfig", str(kubeconfig), "-n", namespace]
    )

    assert result.exit_code == 1
    assert "no-rights" in result.stderr
    assert result.stderr.endswith("; ask for the right, or read a file instead\n")


def test_the_namespace_is_the_contexts_unless_one_is_given(control_plane: ControlPlane):
    result = CliRunner().invoke(
        app, ["why", "chat"], env={"KUBECONFIG": str(control_plane.kubeconfig)}
    )

    assert (result.exit_code, "no PDCluster chat in namespace default;" in result.stderr) == (
        1,
        True,
    )


def test_plan_counts_what_really_runs(
    pdctl: Callable[..., Any],
    control_plane: ControlPlane,
    clusters: Objects,
    namespace: str,
    tmp_path: Path,
):
    running(control_plane, clusters, namespace)
    same = pdctl("plan", "-f", written(tmp_path))
    rolled = pdctl("plan", "-f", written(tmp_path, at("spec.engine.maxSequences", 32)))

    assert "nothing would change" in same.output, same.stderr
    rows = [line.split() for line in rolled.output.splitlines()]
    assert ["decode/cpu", "cpu", "3", "3"] in [row[:4] for row in rows]
    assert ["cpu", "3", "7", "4", "4"] in rows


def test_plan_of_a_file_that_the_api_server_would_refuse_says_the_same(
    pdctl: Callable[..., Any], clusters: Objects, tmp_path: Path
):
    clusters.create(minimal())
    change = at("spec.roles.decode.pools.0.gpu", "B300")
    result = pdctl("plan", "-f", written(tmp_path, change))
    document = minimal()
    change(document)

    assert (
        result.exit_code,
        "gpu: of the pool cpu cannot change from cpu to B300" in result.stderr,
    ) == (2, True)
    assert not clusters.apply(document, force=True).accepted


def test_kubectl_finds_it_as_a_plugin(control_plane: ControlPlane, namespace: str, tmp_path: Path):
    plugin = tmp_path / "kubectl-pd"
    plugin.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pdctl "$@"\n')
    plugin.chmod(0o755)
    command = [
        str(binary("kubectl")),
        "pd",
        "why",
        "talk",
        "-n",
        namespace,
        "--kubeconfig",
        str(control_plane.kubeconfig),
    ]
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=environment
    )

    assert result.returncode == 1
    assert result.stderr.startswith(f"error: no PDCluster talk in namespace {namespace};")
