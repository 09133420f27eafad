"""Commands that take the cluster that runs here, with real etcd and stand-in workers: down, logs,
status --watch, and completion.
"""

import asyncio
import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdcluster_api.errors import StartError
from pdctl.cli.status import watch_status
from pdctl.local import ending
from pdctl.local.ending import end_run
from pdctl.local.run_directory import RunDirectory, runs
from tests.operator.pdctl.run_of_up import BY_A_USER, READY, Run, none_alive
from tests.operator.pdctl.run_state import run_state
from tests.system.pdctl import pdctl

WORKERS = ("chat-prefill-cpu-0", "chat-decode-cpu-0")
Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
async def run(start: Callable[..., Run]) -> Run:
    return await started(start)


async def started(start: Callable[..., Run], standin: str = "serve") -> Run:
    run = start(standin=standin)
    await run.shows(READY)
    return run


def lives(run: Run) -> tuple[tuple[str, int], ...]:
    """State and restarts of each worker."""
    workers = (run.state() or {"workers": ()})["workers"]
    return tuple((worker["state"], worker["restarts"]) for worker in workers)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start a command of pdctl on what `start` runs; stdout and stderr are one pipe."""
    begun: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pdctl", *arguments, "--state-dir", f"{tmp_path}/state"]
        pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        begun.append(subprocess.Popen([*BY_A_USER, *command], text=True, **(pipe | options)))
        return begun[-1]

    yield begin
    for process in begun:
        with process:
            process.kill()


async def test_down_drains_and_ends_the_run_and_says_what_ended(run: Run, begin: Begin) -> None:
    pids = run.pids()
    output, _ = begin("down").communicate(timeout=30)

    assert run.process.wait(10) == 0
    assert none_alive(pids)
    assert "draining; once more ends it at once" in run.text()
    assert run.text().splitlines()[-1] == "stopped"
    assert output.splitlines()[0] == "draining chat; `pdctl down chat --now` ends it at once"
    assert output.splitlines()[-1] == (
        f"chat has ended: process {run.process.pid}, its etcd, {', '.join(WORKERS)}"
    )
    assert {f"{name}: stopped" for name in WORKERS} <= {*output.splitlines()}
    drained = [run.text().find(f"{name}: draining\n") for name in WORKERS]
    assert -1 < min(drained) <= max(drained) < run.text().find(": stopped\n")


@pytest.mark.parametrize("command", ["status", "logs", "down", "chat", "why", "verify"])
def test_a_name_that_is_empty_a_path_or_a_pattern_means_no_cluster(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that is not set, say, ends nothing."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    signals: list[object] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *sent: signals.append(sent))
    monkeypatch.setattr(ending, "DRAIN_SECONDS", 0.0)
    monkeypatch.setattr(ending, "_LAST_SECONDS", 0.1)
    run_state(tmp_path)
    empty, *others = (
        pdctl(command, name, "--state-dir", str(tmp_path)) for name in ("", "*", "/etc", "c?at")
    )

    assert empty.exit_code == 2
    assert "is empty; name a cluster, or leave it out" in empty.stderr
    assert all(found.exit_code in (1, 2) and "error: " in found.stderr for found in others)
    assert signals == []


async def test_down_does_not_hurry_a_drain_and_down_now_does(
    start: Callable[..., Run], begin: Begin, wait_until: Callable[..., Any]
) -> None:
    run = await started(start, "stubborn")
    pids = run.pids()
    waiting = [begin("down", "chat"), begin("down", "chat")]
    await run.shows("draining")
    await wait_until(lambda: run.states() == ["draining"] * 2, "the drain in the state")
    assert all(process.poll() is None for process in (run.process, *waiting))

    begin("down", "--now").communicate(timeout=30)
    assert run.process.wait(10) == 0
    assert "killing chat-prefill-cpu-0, chat-decode-cpu-0: not drained" in run.text()
    assert none_alive(pids)
    assert [process.wait(30) for process in waiting] == [0, 0]


async def test_down_now_is_as_two_signals(start: Callable[..., Run], begin: Begin) -> None:
    run = await started(start, "stubborn")
    output, _ = begin("down", "--now").communicate(timeout=30)

    assert run.process.wait(10) == 0
    assert "not drained" in run.text()
    assert output.splitlines()[-1].startswith("chat has ended: process")


async def test_down_names_a_process_that_does_not_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory,) = runs(run.state_dir)
    monkeypatch.setattr(ending, "DRAIN_SECONDS", 0.0)
    monkeypatch.setattr(ending, "_LAST_SECONDS", 0.1)
    run.process.send_signal(signal.SIGSTOP)
    result = pdctl("down", "--state-dir", str(run.state_dir))

    assert result.exit_code == 1
    assert f"error: chat: still running: process {run.process.pid}; look at its" in result.stderr
    assert f"in {directory.logs}, and end it with kill -9 {run.process.pid}" in result.stderr
    run.process.send_signal(signal.SIGCONT)
    assert run.process.wait(30) == 0


def test_down_leaves_a_process_that_has_the_pid_of_an_ended_run_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        directory = RunDirectory(tmp_path / "chat" / f"run-{other.pid}-1-x")
        directory.logs.mkdir(parents=True)
        directory.write_state({"name": "chat", "workers": []})
        result = pdctl("down", "--state-dir", str(tmp_path))
        end_run(directory, lambda: None, hurry=True)

        assert (result.exit_code, result.stderr) == (
            1,
            "error: no cluster runs here; start one with `pdctl up MODEL`\n",
        )
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("command", ["down", "chat", "status"])
def test_a_name_that_does_not_run_here_brings_the_names_that_do(
    command: str, tmp_path: Path
) -> None:
    for name in ("keyed", "chat"):
        RunDirectory.create(tmp_path, name).write_state({"name": name, "workers": []})
    result = pdctl(command, "nosuch", "--state-dir", str(tmp_path))

    assert (result.exit_code, result.stderr) == (
        1,
        "error: no cluster named nosuch runs here; running here: chat, keyed\n",
    )


def test_down_of_another_user_s_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory.create(tmp_path, "chat")
    directory.write_state({"name": "chat", "workers": []})

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    result = pdctl("down", "--state-dir", str(tmp_path))

    assert result.exit_code == 1
    assert f"error: process {os.getpid()} of chat is another user's" in result.stderr


async def test_logs_are_those_of_each_worker_by_its_name(run: Run, begin: Begin) -> None:
    pids = dict(zip(("etcd", *WORKERS), run.pids(), strict=True))
    output, _ = begin("logs").communicate(timeout=30)
    found = {
        line.partition("|")[0].strip(): line.partition("| ")[2] for line in output.splitlines()
    }
    assert all(found[name] == f"process {pids[name]} is ready" for name in WORKERS)

    (log,) = run.state_dir.glob(f"chat/run-*/logs/{WORKERS[1]}.log")
    log.write_text("first\nsecond\nhalf a li")
    expected = f"{WORKERS[1]} | second\n{WORKERS[1]} | half a li\n"
    for names in (["chat", WORKERS[1]], [WORKERS[1]]):
        output, _ = begin("logs", *names, "--tail", "1").communicate(timeout=30)
        assert output == expected
    output, _ = begin("logs", "chat", "decode-0").communicate(timeout=30)
    assert output == (
        "error: chat has no worker decode-0; give one of chat-decode-cpu-0, chat-prefill-cpu-0, "
        "etcd\n"
    )


async def test_followed_logs_go_on_with_a_restarted_worker_and_end_with_the_run(
    run: Run, begin: Begin, wait_until: Callable[..., Any]
) -> None:
    first = run.pids()[1]
    with begin("logs", "-f", WORKERS[0]) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == f"{WORKERS[0]} | process {first} is ready\n"
        os.kill(first, signal.SIGKILL)
        second = follower.stdout.readline()
        await wait_until(lambda: lives(run) == (("ready", 1), ("ready", 0)), "the second life")
        assert second == f"{WORKERS[0]} | process {run.pids()[1]} is ready\n"

        run.process.send_signal(signal.SIGINT)
        assert follower.wait(30) == 0


async def test_logs_of_an_ended_run_are_found_by_its_name(
    start: Callable[..., Run], begin: Begin
) -> None:
    run = start(standin="exit 2")
    assert run.process.wait(30) == 2
    output, _ = begin("logs", "chat").communicate(timeout=30)

    assert output.splitlines()[0] == "chat has ended; these are the logs of its last run"
    # of the first to end
    assert re.search(r"-cpu-0 +\| error: model kind is not supported\n", output)


async def test_watched_status_shows_changes_until_the_run_ends(run: Run, begin: Begin) -> None:
    lines, objects = begin("status", "--watch"), begin("status", "-w", "-o", "json")
    shown = {process: process.stdout.readline() for process in (lines, objects) if process.stdout}
    os.kill(run.pids()[1], signal.SIGKILL)
    assert lines.stdout is not None
    watched = ""
    while f"{WORKERS[0]}: ready" not in watched:
        watched += await asyncio.to_thread(lines.stdout.readline)
    run.process.send_signal(signal.SIGINT)
    (plain, _), (json_lines, _) = lines.communicate(timeout=30), objects.communicate(timeout=30)

    assert shown[lines].startswith(f"{WORKERS[0]}: ready (http 127.0.0.1:")
    changes = [line.partition(" (")[0] for line in (watched + plain).splitlines()]
    of_one = [line.removeprefix(f"{WORKERS[0]}: ") for line in changes if WORKERS[0] in line]
    brief = ("starting", "draining")  # each may be shorter than a look at the state
    assert [state for state in of_one if state not in brief] == ["restarting", "ready", "stopped"]
    assert changes[-1] == "chat has ended"
    states = [json.loads(line) for line in [shown[objects], *json_lines.splitlines()[:-1]]]
    assert [state["workers"][0]["restarts"] for state in states] == sorted(
        state["workers"][0]["restarts"] for state in states
    )
    assert (lines.returncode, objects.returncode) == (0, 0)


@pytest.mark.parametrize("state", ["ready", "failed"])
def test_watched_status_fails_with_a_run_that_was_not_drained(tmp_path: Path, state: str) -> None:
    directory = RunDirectory(tmp_path / "chat" / "run-1-1-x")
    directory.path.mkdir(parents=True)
    worker = {"name": "w", "role": "decode", "pool": "", "state": state, "pid": 1, "restarts": 0}
    directory.write_state({"name": "chat", "workers": [{**worker, "log": "w.log"}]})

    with pytest.raises(StartError, match="chat failed or was killed; its logs: pdctl logs chat"):
        watch_status(directory, "table")


def test_watched_status_ends_where_the_folder_of_the_run_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory.create(tmp_path, "chat")
    shutil.rmtree(directory.path)
    watch_status(directory, "json")

    assert capsys.readouterr() == ("", "chat has ended\n")


async def test_down_ends_a_run_whose_folder_is_gone(
    start: Callable[..., Run], begin: Begin, wait_until: Callable[..., Any]
) -> None:
    run = await started(start, "stubborn")
    down = begin("down")
    await run.shows("draining")

    def is_gone() -> bool:
        shutil.rmtree(run.state_dir, ignore_errors=True)  # the run may write into it meanwhile
        return not run.state_dir.exists()

    await wait_until(is_gone, "the folder's end", 20)
    begin("down", "--now").communicate(timeout=30)
    run.process.send_signal(signal.SIGINT)
    output, _ = down.communicate(timeout=30)

    assert (down.returncode, output.splitlines()[-1][:14]) == (0, "chat has ended")


async def test_watched_status_is_a_live_table_on_a_terminal(
    run: Run, begin: Begin, wait_until: Callable[..., Any]
) -> None:
    ours, theirs = pty.openpty()
    terminal = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = begin("status", "--watch", stdout=theirs, stderr=theirs, env=terminal)
    os.close(theirs)
    os.set_blocking(ours, False)
    shown = b""

    def has_table() -> bool:
        nonlocal shown
        with contextlib.suppress(BlockingIOError):
            shown += os.read(ours, 65536)
        plain = re.sub(rb"\x1b\[[0-9;?]*[a-z]", b"", shown)
        return re.search(
            rb"worker +state +http.*chat-decode-cpu-0 +ready.*NoLongPrompts", plain, re.S
        )

    await wait_until(has_table, "the table", 20)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    os.close(ours)


async def test_a_shell_completes_names_of_clusters_and_workers(run: Run, tmp_path: Path) -> None:
    """By the script in a real bash."""

    def completed(line: str) -> list[str]:
        words = line.split(" ")
        script = (
            f"source <(pdctl completion bash); COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
            'complete -p pdctl >/dev/null && _pdctl_completion pdctl; printf "%s\\n" '
            '"${COMPREPLY[@]}"'
        )
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
        }
        answer = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env=environment | {"XDG_STATE_HOME": str(tmp_path)},
        )
        return answer.stdout.split()

    (tmp_path / "pdcluster").symlink_to(run.state_dir)
    assert completed("pdctl dow") == ["down"]
    assert completed("pdctl down ") == ["chat"]
    assert completed("pdctl logs chat chat-p") == [WORKERS[0]]
    assert completed("pdctl logs ") == ["chat", *sorted(WORKERS), "etcd"]
    assert completed("pdctl status --wa") == ["--watch"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_a_script_for_each_shell(shell: str) -> None:
    result = pdctl("completion", shell)

    assert result.exit_code == 0
    assert f"_PDCTL_COMPLETE=complete_{shell}" in result.output


def test_python_m_completes_and_helps_by_the_name_of_the_program() -> None:
    command = [sys.executable, "-m", "pdctl"]
    script = subprocess.run(
        [*command, "completion", "bash"], capture_output=True, text=True, check=True
    )
    usage = subprocess.run(
        [*command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "_TYPER_FORCE_DISABLE_TERMINAL": "1"},  # PY_COLORS=0 would force it
    )

    assert "_PDCTL_COMPLETE=complete_bash" in script.stdout
    assert "Usage: pdctl " in usage.stdout
