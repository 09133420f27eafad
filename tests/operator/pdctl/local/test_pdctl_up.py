"""`pdctl up` from start to end, with real etcd and stand-in workers."""

import contextlib
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.operator.pdctl.run_of_up import READY, Run, none_alive
from tests.operator.pdctl.stub_model import stub_model

_CHAT = Path(__file__).parents[4] / "examples" / "chat.yaml"


def processes_of(run: Run) -> list[int]:
    """Whatever was started on the run's files."""
    commands = {
        process.pid: " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["cmdline"])
    }
    return [pid for pid, command in commands.items() if str(run.state_dir) in command]


async def test_up_serves_the_file_that_kubernetes_takes_until_sigterm_and_leaves_no_process(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """The file of e2e, as it is: its model comes from the cache, and what is Kubernetes' is said to
    have no effect.
    """
    folder = tmp_path / ".cache/pdcluster/smollm2-135m-instruct"
    stub_model(folder)
    run = start("--port", "0", standin="parent", file=_CHAT)
    await run.shows(READY)
    assert run.text().splitlines()[1:5] == [
        f"model {folder}, from the cache, by the name smollm2-135m-instruct",
        "spec.model.pvc has no effect here: there are no volumes here",
        "spec.roles.prefill.resources, spec.roles.decode.resources have no effect here: a process "
        "may take what the machine has",
        "spec.rollout has no effect here: there is one revision, and workers have a minute to "
        "finish their streams",
    ]
    (engine,) = tmp_path.glob("state/chat/run-*/config/chat-decode-cpu-0.yaml")
    assert yaml.safe_load(engine.read_text())["model"]["path"] == str(folder)
    pids = run.pids()
    children = [child.pid for child in psutil.Process(run.process.pid).children(recursive=True)]
    assert len(children) == 5  # etcd, two workers, a child of each

    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(30) == 0
    assert none_alive([*pids, *children])
    assert run.text().splitlines()[-1] == "stopped"
    assert run.states() == ["stopped", "stopped"]


async def test_up_killed_leaves_no_process(
    start: Callable[..., Run], wait_until: Callable[..., Any]
) -> None:
    run = start()
    await run.shows(READY)
    pids = run.pids()

    run.process.kill()
    run.process.wait()
    await wait_until(lambda: none_alive(pids), "the end of every child")


async def test_up_restarts_a_killed_worker_and_says_so(
    start: Callable[..., Run], wait_until: Callable[..., Any]
) -> None:
    run = start()
    await run.shows(READY)
    first = run.pids()[1]

    os.kill(first, signal.SIGKILL)
    await run.shows("chat-prefill-cpu-0 ended with signal SIGKILL, starts again in 1 s")
    await wait_until(
        lambda: (
            (run.state() or {})["workers"][0]["restarts"] == 1
            and run.states() == ["ready", "ready"]
        ),
        "the second life",
    )
    assert run.pids()[1] != first


async def test_up_restarts_etcd_at_its_address(
    start: Callable[..., Run], wait_until: Callable[..., Any]
) -> None:
    run = start()
    await run.shows(READY)
    port = int((run.state() or {})["etcd"]["endpoints"][0].partition(":")[2])

    os.kill(run.pids()[0], signal.SIGKILL)
    await run.shows("etcd ended with signal SIGKILL")

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    await wait_until(answers, "etcd again")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(30) == 0


async def test_up_ends_with_2_when_a_worker_refuses_its_input(start: Callable[..., Run]) -> None:
    run = start(standin="exit 2")
    assert run.process.wait(30) == 2
    assert "cpu-0: model kind is not supported (log " in run.text()
    assert processes_of(run) == []


async def test_up_second_signal_kills_a_worker_that_does_not_drain(
    start: Callable[..., Run],
) -> None:
    run = start(standin="stubborn")
    await run.shows(READY)
    pids = run.pids()

    run.process.send_signal(signal.SIGINT)
    await run.shows("draining")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(30) == 0
    assert "killing chat-prefill-cpu-0, chat-decode-cpu-0: not drained" in run.text()
    assert none_alive(pids)


async def test_up_refuses_an_edit_that_yaml_cannot_read_and_takes_the_next(
    start: Callable[..., Run],
    document: dict[str, Any],
    write_document: Callable[[dict[str, Any]], Path],
) -> None:
    run = start()
    await run.shows(READY)

    document["spec"]["routing"] = {"offload": {"prefillLengthThreshold": 32}}
    path = write_document(document)
    good = path.read_text()
    path.write_text(
        good.replace("prefillLengthThreshold: 32", "prefillLengthThreshold: 2020-13-45")
    )
    await run.shows("not YAML: month must be in 1..12; correct that line")
    path.write_text(good)
    await run.shows("policy updated")
    policy = yaml.safe_load(Path((run.state() or {})["policy"]).read_text())
    assert policy["offload"]["prefillLengthThreshold"] == 32
    assert run.states() == ["ready", "ready"]


async def test_up_refuses_a_name_that_runs_here_until_that_run_has_ended(
    start: Callable[..., Run],
) -> None:
    first = start()
    await first.shows(READY)
    port = first.text().partition(READY)[2].partition("/")[0]
    second = start()
    assert second.process.wait(30) == 2
    assert second.text() == (
        f"error: chat runs here already: process {first.process.pid}, port {port}; end that one "
        "first, or give this one another metadata.name, a MODEL by --name\n"
    )
    assert first.process.poll() is None

    first.process.kill()
    first.process.wait()
    third = start()
    await third.shows("chat: starting revision")


async def test_up_says_that_a_given_etcd_is_unreachable(
    start: Callable[..., Run], document: dict[str, Any]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
        document["spec"]["discovery"] = {"etcd": {"endpoints": [endpoint]}}
        run = start()
        assert run.process.wait(30) == 1
    assert f"spec.discovery.etcd.endpoints: etcd does not answer at {endpoint}" in run.text()


def api(prometheus: str, path: str) -> Any:
    """Ask Prometheus."""
    return httpx.get(f"{prometheus}/api/v1/{path}").raise_for_status().json()["data"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus")
async def test_observe_runs_prometheus_over_the_workers_and_ends_it_with_them(
    start: Callable[..., Run], wait_until: Callable[..., Any]
) -> None:
    run = start("--port", "0", "--observe")
    await run.shows(READY)
    (address,) = re.findall(r"^prometheus: (http://127.0.0.1:\d+),", run.text(), re.MULTILINE)

    def targets() -> list[tuple[str, ...]]:
        names = ("namespace", "pdcluster", "role", "pool", "pod")
        with contextlib.suppress(httpx.TransportError):
            found = api(address, "targets")["activeTargets"]
            return sorted(tuple(each["labels"][name] for name in names) for each in found)
        return []

    await wait_until(lambda: len(targets()) == 2, "both workers are scraped")
    assert targets() == [
        ("default", "chat", role, "cpu", f"chat-{role}-cpu-0") for role in ("decode", "prefill")
    ]

    def rules() -> dict[str, str]:
        groups = api(address, "rules")["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    await wait_until(lambda: "unknown" not in rules().values(), "all rules were evaluated")
    names = rules()
    assert set(names.values()) == {"ok"}
    assert "PDClusterEngineStalled" in names
    assert "PDClusterOperatorSilent" not in names  # there is no operator here

    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(30) == 0
    assert processes_of(run) == []


def test_observe_without_prometheus_says_what_to_install(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = start("--port", "0", "--observe")

    assert run.process.wait(30) == 2
    assert "no prometheus on the PATH; install it (Debian: apt-get install prometheus)" in (
        " ".join(run.text().split())
    )
    assert run.state() is None
