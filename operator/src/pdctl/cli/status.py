"""`pdctl status`, and which cluster a command means: a local run or one in Kubernetes."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import typer

from pdcluster_api.errors import StartError
from pdcluster_api.plan.observed.state import Previous
from pdcluster_schema import conditions as words
from pdctl.cli.live import KubeContext
from pdctl.local.run_directory import RunDirectory, runs
from pdctl.local.screen import make_screen
from pdctl.local.watcher import rows_of

_WATCH_SECONDS = 0.5
_COLUMNS = ("name", "state", "http", "pid", "restarts", "log")


def _running(state_dir: Path, name: str | None) -> list[tuple[RunDirectory, dict[str, Any]]]:
    return [
        (run, state)
        for run in runs(state_dir, name)
        if run.is_alive and (state := run.read_state()) is not None
    ]


def find_directory(state_dir: Path, name: str | None) -> tuple[RunDirectory, dict[str, Any]]:
    """Without a name: the only run.  Raises StartError where there is none, or several."""
    running = _running(state_dir, name)
    names = sorted({state["name"] for _, state in running})
    if not running:
        others = sorted({state["name"] for _, state in _running(state_dir, None)})
        fix = f"running here: {', '.join(others)}" if others else "start one with `pdctl up MODEL`"
        named = f" named {name}" if name else ""
        raise StartError(f"no cluster{named} runs here; {fix}", exit_code=1)
    if len(names) > 1:
        raise StartError(f"several clusters run here: name one of {', '.join(names)}", exit_code=2)
    return running[-1]


def render_status(state: dict[str, Any], output: Literal["table", "json"]) -> str:
    if output == "json":
        return json.dumps(state, indent=2)
    rows = [
        _COLUMNS,
        *(
            tuple(str(worker[column] if worker[column] is not None else "-") for column in _COLUMNS)
            for worker in state["workers"]
        ),
    ]
    widths = [max(len(row[index]) for row in rows) for index in range(len(_COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    head = (
        f"{state['name']}  revision {state['revision']}  etcd "
        f"{','.join(state['etcd']['endpoints'])}"
    )
    return "\n".join([head, *lines, _ready(state["workers"]), *_notes(state)])


def watch_status(run: RunDirectory, output: Literal["table", "json"]) -> None:
    """Show each change until the run has ended, or its folder is gone.  Raises StartError (exit
    code 1) where it was not drained.
    """
    shown: dict[str, Any] = {}
    with make_screen(progress=output == "table") as screen:
        while True:
            is_alive, state = run.is_alive, run.read_all()
            if not state:
                break
            if state != shown and output == "json":
                typer.echo(json.dumps(state))
            elif state != shown:
                screen.show(rows_of(state), _notes(state))
            if not is_alive:
                break
            shown = state
            time.sleep(_WATCH_SECONDS)
    if not all(worker["state"] == "stopped" for worker in state.get("workers", ())):
        message = f"{run.name} failed or was killed; its logs: pdctl logs {run.name}"
        raise StartError(message, exit_code=1)
    typer.echo(f"{run.name} has ended", err=True)


def _notes(state: Mapping[str, Any]) -> list[str]:
    return [
        *_disaggregation(state.get("disaggregation")),
        *transfer_line(state),
        *state.get("remarks", ()),
    ]


def transfer_line(status: Mapping[str, Any]) -> list[str]:
    found = Previous(status).condition(words.KV_TRANSFER_VERIFIED)
    if not found:
        return []
    return [f"kv transfer verified: {found['status']} ({found['reason']}): {found['message']}"]


def _ready(workers: Sequence[Mapping[str, Any]]) -> str:
    desired = Counter(worker["role"] for worker in workers)
    ready = Counter(worker["role"] for worker in workers if worker["state"] == "ready")
    return "ready: " + ", ".join(
        f"{role} {ready[role]}/{number}" for role, number in sorted(desired.items())
    )


def _disaggregation(found: dict[str, Any] | None) -> list[str]:
    """Empty for mixed workers."""
    return (
        [f"disaggregating: {found['status']} ({found['reason']}): {found['message']}"]
        if found
        else []
    )


LocalRun = tuple[RunDirectory, dict[str, Any]]


def find_local_run(state_dir: Path, name: str | None, kube_context: KubeContext) -> LocalRun | None:
    """None = Kubernetes is meant: an option of it is given, or no run here matches.

    Raises StartError where neither a matching run nor a kubeconfig exists, and without a name
    where several run.
    """
    if kube_context != KubeContext():
        return None
    names = sorted({state["name"] for _, state in _running(state_dir, None)})
    if name in names or (name is None and names):
        return find_directory(state_dir, name)
    if name is None or not names or kube_context.has_file():
        return None
    raise StartError(
        f"no cluster named {name} runs here, only {', '.join(names)}; for one in Kubernetes set "
        "KUBECONFIG, or give --kubeconfig",
        exit_code=2,
    )
