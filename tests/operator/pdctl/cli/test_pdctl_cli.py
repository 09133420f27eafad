"""The commands of pdctl that start nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdctl.cli.main import app
from pdctl.local.run_directory import RunDirectory

STATE = {
    "name": "chat",
    "revision": "abc",
    "etcd": {"endpoints": ["127.0.0.1:1"], "pid": 5},
    "workers": [
        {
            "name": "chat-decode-cpu-0",
            "role": "decode",
            "pool": "cpu",
            "state": "ready",
            "http": "127.0.0.1:8000",
            "pid": 7,
            "restarts": 0,
            "log": "/l",
        },
        {
            "name": "chat-prefill-cpu-0",
            "role": "prefill",
            "pool": "cpu",
            "state": "restarting",
            "http": None,
            "pid": None,
            "restarts": 2,
            "log": "/m",
        },
        {
            "name": "chat-router-cpu-0",
            "role": "router",
            "pool": "cpu",
            "state": "ready",
            "http": "127.0.0.1:8001",
            "pid": 8,
            "restarts": 0,
            "log": "/r",
        },
    ],
}


@pytest.fixture
def pdctl() -> Callable[..., Any]:
    """`pdctl` on a plain terminal of 80 columns: no color parts the words of its output, whatever
    forces one on.
    """
    runner = CliRunner(env={"TERM": "dumb", "COLUMNS": "80"})
    return lambda *arguments: runner.invoke(app, list(arguments))


def test_validate_says_valid(
    pdctl: Callable[..., Any], document: dict[str, Any], write_document: Callable[..., Path]
) -> None:
    result = pdctl("validate", str(write_document(document)))

    assert (result.exit_code, "chat is valid, revision " in result.output) == (0, True)


@pytest.mark.parametrize("command", ["validate", "up"])
def test_bad_file_is_exit_2_with_a_line_for_each_fault(
    command: str,
    pdctl: Callable[..., Any],
    document: dict[str, Any],
    write_document: Callable[..., Path],
) -> None:
    document["spec"]["engine"] = {"blocksize": 16, "threads": "two"}
    path = write_document(document)
    result = pdctl(command, str(path))

    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"error: {path}: spec.engine.threads: must be a whole number, not 'two'; write it without "
        "quotes or a fraction",
        f"error: {path}: spec.engine.blocksize: unknown field; did you mean blockSize?",
    ]


@pytest.mark.parametrize("command", ["validate", "up"])
def test_file_that_yaml_cannot_read_is_exit_2(
    command: str,
    pdctl: Callable[..., Any],
    document: dict[str, Any],
    write_document: Callable[..., Path],
) -> None:
    document["spec"]["routing"] = {"offload": {"prefillQueueMax": "DATE"}}
    path = write_document(document)
    path.write_text(path.read_text().replace("DATE", "2020-13-45"))
    result = pdctl(command, str(path))

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {path}: not YAML: month must be in 1..12; ")


def test_batches_ahead_beyond_its_limit_is_exit_2(
    pdctl: Callable[..., Any], document: dict[str, Any], write_document: Callable[..., Path]
) -> None:
    document["spec"]["routing"] = {"credits": {"batchesAhead": 1.0e308}}
    result = pdctl("validate", str(write_document(document)))

    assert result.exit_code == 2
    assert (
        "spec.routing.credits.batchesAhead: must be at most 1000, not 1e+308; lower it"
        in result.stderr
    )


def test_up_refuses_a_plan_for_another_machine(
    pdctl: Callable[..., Any], document: dict[str, Any], write_document: Callable[..., Path]
) -> None:
    document["spec"]["roles"]["decode"]["pools"][0]["gpu"] = "B300"
    result = pdctl("up", str(write_document(document)))

    assert result.exit_code == 2
    assert (
        "spec.roles.decode.pools[0].gpu: pdctl runs cpu pools on this machine, not B300"
        in result.stderr
    )


def test_up_tells_where_it_looks_for_the_model(pdctl: Callable[..., Any]) -> None:
    shown = pdctl("up", "--help").output

    assert all(word in shown for word in ("--model-path", "spec.model.path", "spec.model.name"))


def test_up_takes_the_port_from_the_environment(
    pdctl: Callable[..., Any],
    document: dict[str, Any],
    write_document: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDCLUSTER_PORT", "no")

    assert pdctl("up", str(write_document(document))).exit_code == 2


def test_status_shows_workers(pdctl: Callable[..., Any], tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "chat").write_state(STATE)
    table = pdctl("status", "--state-dir", str(tmp_path))
    as_json = pdctl("status", "chat", "--output", "json", "--state-dir", str(tmp_path))

    assert table.output == (
        "chat  revision abc  etcd 127.0.0.1:1\n"
        "name                state       http            pid  restarts  log\n"
        "chat-decode-cpu-0   ready       127.0.0.1:8000  7    0         /l\n"
        "chat-prefill-cpu-0  restarting  -               -    2         /m\n"
        "chat-router-cpu-0   ready       127.0.0.1:8001  8    0         /r\n"
        "ready: decode 1/1, prefill 0/1, router 1/1\n"
    )
    assert json.loads(as_json.output) == STATE


def test_status_says_whether_prefill_and_decode_work_together(
    pdctl: Callable[..., Any], tmp_path: Path
) -> None:
    found = {
        "status": "False",
        "reason": "PairRefused",
        "message": "decode worker a may not use prefill worker b",
    }
    RunDirectory.create(tmp_path, "chat").write_state(STATE | {"disaggregation": found})
    last = pdctl("status", "--state-dir", str(tmp_path)).output.splitlines()[-1]

    assert (
        last == "disaggregating: False (PairRefused): decode worker a may not use prefill worker b"
    )


def test_status_without_a_run_is_exit_1(pdctl: Callable[..., Any], tmp_path: Path) -> None:
    result = pdctl("status", "chat", "--state-dir", str(tmp_path))

    assert (result.exit_code, result.stderr) == (
        1,
        "error: no cluster named chat runs here; start one with `pdctl up FILE`\n",
    )


def test_status_of_several_asks_for_a_name(pdctl: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("a", "b"):
        RunDirectory.create(tmp_path, name).write_state(STATE | {"name": name})
    result = pdctl("status", "--state-dir", str(tmp_path))

    assert (result.exit_code, result.stderr) == (
        2,
        "error: several clusters run here: name one of a, b\n",
    )


@pytest.fixture
def no_kubeconfig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))


@pytest.mark.usefixtures("no_kubeconfig")
@pytest.mark.parametrize("name", [[], ["chat"]])
def test_why_explains_a_cluster_that_runs_here(
    pdctl: Callable[..., Any], tmp_path: Path, name: list[str]
) -> None:
    RunDirectory.create(tmp_path, "chat").write_state(STATE | {"pid": 4})
    result = pdctl("why", *name, "--state-dir", str(tmp_path))

    assert (result.exit_code, result.output.splitlines()) == (
        0,
        [
            "chat runs on this machine (process 4): its pools have the sizes of its file, and no "
            "autoscaler changes them",
            "decode/cpu: 1",
            "prefill/cpu: 1",
            "router/cpu: 1",
            "why a request went where it went: pdctl why --request ID, by its x-request-id",
        ],
    )


@pytest.mark.usefixtures("no_kubeconfig")
@pytest.mark.parametrize("command", ["why", "verify"])
def test_a_name_that_runs_nowhere_here_is_refused_with_those_that_do(
    pdctl: Callable[..., Any], tmp_path: Path, command: str
) -> None:
    RunDirectory.create(tmp_path, "chat").write_state(STATE)
    result = pdctl(command, "nope", "--state-dir", str(tmp_path))

    assert (result.exit_code, result.stderr) == (
        2,
        "error: no cluster named nope runs here, only chat; for one in Kubernetes set KUBECONFIG, "
        "or give --kubeconfig\n",
    )


@pytest.mark.usefixtures("no_kubeconfig")
@pytest.mark.parametrize("command", ["why", "verify"])
def test_without_a_name_or_a_run_the_name_is_missing(
    pdctl: Callable[..., Any], tmp_path: Path, command: str
) -> None:
    result = pdctl(command, "--state-dir", str(tmp_path))

    assert (result.exit_code, result.stderr.split(": ")[1]) == (2, "which cluster? none runs here")


@pytest.mark.usefixtures("no_kubeconfig")
def test_options_of_kubernetes_mean_no_run_of_this_machine(
    pdctl: Callable[..., Any], tmp_path: Path
) -> None:
    RunDirectory.create(tmp_path, "chat").write_state(STATE)
    result = pdctl("why", "chat", "--namespace", "a", "--state-dir", str(tmp_path))

    assert result.stderr.startswith("error: no kubeconfig")


def test_module_is_pdctl() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pdctl", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "NO_COLOR": "1"},
    )

    assert all(command in result.stdout for command in ("up", "status", "validate"))
