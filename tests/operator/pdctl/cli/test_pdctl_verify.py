"""`pdctl verify` of a run on this machine, and its line in `pdctl status`.

Of a cluster in Kubernetes: tests/apiserver/test_pdctl_on_a_cluster.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from pdcluster_api.errors import StartError
from pdctl.cli.main import app
from pdctl.cli.verify import VerifyTimeouts, is_answered, verify_run
from tests.operator.pdctl.run_state import run_state
from tests.operator.played_worker import PASSED, PlayedWorker

FAILED = {
    "outcome": "failed",
    "fault": "not_connected",
    "message": "no prefill worker of pool cpu answers",
}


@pytest.fixture
def pdctl(tmp_path: Path) -> Callable[..., Any]:
    """Run it in a thread, while its worker answers in this one."""

    async def run(*arguments: str) -> Any:
        options = [*arguments, "--state-dir", str(tmp_path)]
        return await asyncio.to_thread(CliRunner().invoke, app, options)

    return run


async def test_figures_of_each_pair_are_shown_and_kept(
    pdctl: Callable[..., Any], tmp_path: Path
) -> None:
    worker = PlayedWorker([PASSED])
    async with worker.serving():
        run_state(tmp_path, worker)
        result = await pdctl("verify", "chat")
    table = await pdctl("status")
    as_json = await pdctl("status", "-o", "json")

    line = (
        "kv transfer verified: True (KVMoved): prefill pool cpu to decode pool cpu: 1 kB over tcp "
        "at 2 kB/s in this verification, checksums and 8 tokens equal"
    )
    assert result.exit_code == 0, result.stderr
    assert result.output.splitlines() == [
        "PREFILL  DECODE  RESULT    TRANSPORT  MOVED    RATE  TOKENS  WORKERS",
        "cpu      cpu     verified  tcp         1 kB  2 kB/s       8  p-0 to decode-0",
        line,
    ]
    assert worker.requested[0]["even_if_busy"] is True
    assert table.output.splitlines()[-1] == line
    assert json.loads(as_json.output)["transfers"]["pairs"][0]["bytesPerSecond"] == 2000


async def test_pair_that_fails_is_exit_1(pdctl: Callable[..., Any], tmp_path: Path) -> None:
    worker = PlayedWorker([FAILED])
    async with worker.serving():
        run_state(tmp_path, worker)
        result = await pdctl("verify", "chat")

    assert result.exit_code == 1
    assert result.output.splitlines()[1].split()[:6] == ["cpu", "cpu", "not_connected", *"---"]
    assert "False (TransferFailed)" in result.output


async def test_worker_that_gives_no_outcome_is_tried_until_time_is_up(tmp_path: Path) -> None:
    worker, timeouts = (
        PlayedWorker([grpc.StatusCode.UNIMPLEMENTED]),
        VerifyTimeouts(worker=0.05, poll=0.0),
    )
    async with worker.serving():
        run = run_state(tmp_path, worker)
        with pytest.raises(StartError, match="is of an image that verifies no transfers"):
            await verify_run(run, "now", timeouts)

        worker.answers[:] = [grpc.StatusCode.INTERNAL, PASSED]
        found = await verify_run(run, "later", VerifyTimeouts(poll=0.0))
    assert found["transfers"]["pairs"][0]["request"] == "later"


async def test_mixed_workers_move_no_kv(pdctl: Callable[..., Any], tmp_path: Path) -> None:
    run = run_state(tmp_path)
    run.write_state((run.read_state() or {}) | {"workers": []})
    result = await pdctl("verify", "chat")

    assert (result.exit_code, result.stderr) == (
        2,
        "error: the cluster has no prefill workers, so that no KV moves between its workers\n",
    )


@pytest.mark.parametrize(
    ("requests", "condition", "expected"),
    [
        (["new", "new"], "True", True),
        (["new", "new"], "False", True),
        (["new", "new"], "Unknown", False),
        (["new", "old"], "True", False),
        (["old", None], "True", False),
        ([], "Unknown", False),
    ],
)
def test_every_pair_has_to_answer(
    requests: list[str | None], condition: str, expected: bool
) -> None:
    pairs = [
        {"prefill": f"p{n}", "decode": "d", "at": "2026-01-02T03:04:05Z", "request": request}
        for n, request in enumerate(requests)
    ]
    conditions = [{"type": "KVTransferVerified", "status": condition}]
    status = {"transfers": {"revision": "a", "pairs": pairs}, "conditions": conditions}

    assert is_answered(status, "new") is expected


def test_a_rate_that_was_not_measured_is_an_answer() -> None:
    pair = {"prefill": "p", "decode": "d", "at": "2026-01-02T03:04:05Z", "request": "new"}
    condition = {"type": "KVTransferVerified", "status": "Unknown", "reason": "RateNotMeasured"}
    status = {"transfers": {"revision": "a", "pairs": [pair]}, "conditions": [condition]}

    assert is_answered(status, "new")
