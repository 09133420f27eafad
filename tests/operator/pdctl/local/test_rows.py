"""Facts of a worker from its process and its record."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from pdcluster_api.discovery.etcd import RegisteredWorker
from pdcluster_api.plan.observed.state import WorkerDisaggregation
from pdctl.local.processes import Launch, ManagedProcess, Phase
from pdctl.local.screen import LiveScreen, Screen, make_screen
from pdctl.local.watcher import RestartLedger, Row, make_rows

RECORD = RegisteredWorker("w", "decode", "cpu", "e1", "ready", {"http": "127.0.0.1:8000"})


def keeper(phase: Phase, num_starts: int) -> ManagedProcess:
    made = ManagedProcess(Launch("w", (), Path("/logs/w.log")), lambda text: None)
    made.phase, made.num_starts, made.pid = phase, num_starts, 7 if phase == "running" else None
    return made


def row(kept: ManagedProcess, record: RegisteredWorker | None, ledger: RestartLedger) -> Row:
    return make_rows([("decode", "cpu", kept)], {"w": record} if record else {}, ledger)[0]


@pytest.mark.parametrize(
    ("phase", "num_starts", "record", "state"),
    [
        ("waiting", 0, None, "starting"),
        ("running", 1, None, "starting"),
        ("running", 1, replace(RECORD, engine_id="", state="starting"), "starting"),
        ("running", 1, RECORD, "ready"),
        ("running", 1, replace(RECORD, state="draining"), "draining"),
        ("draining", 1, None, "draining"),
        ("waiting", 1, RECORD, "restarting"),
        ("failed", 1, None, "failed"),
        ("stopped", 1, RECORD, "stopped"),
    ],
)
def test_row_state_is_of_process_and_record(
    phase: Phase, num_starts: int, record: RegisteredWorker | None, state: str
) -> None:
    assert row(keeper(phase, num_starts), record, RestartLedger({})).state == state


def test_record_of_an_earlier_life_says_nothing() -> None:
    ledger = RestartLedger({})
    assert row(keeper("running", 1), RECORD, ledger).is_ready

    second = row(keeper("running", 2), RECORD, ledger)
    assert (second.state, second.num_restarts, dict(second.addresses)) == ("starting", 1, {})
    assert row(keeper("running", 2), replace(RECORD, engine_id="e2"), ledger).is_ready


def test_row_has_what_the_record_says_of_disaggregation_while_the_worker_runs() -> None:
    said = WorkerDisaggregation("tcp")
    record = replace(RECORD, disaggregation=said)

    assert row(keeper("running", 1), record, RestartLedger({})).disaggregation == said
    assert row(keeper("stopped", 1), record, RestartLedger({})).disaggregation is None
    assert row(keeper("running", 1), None, RestartLedger({})).disaggregation is None


def test_record_that_etcd_lost_is_not_a_start() -> None:
    ledger = RestartLedger({})
    assert row(keeper("running", 1), RECORD, ledger).is_ready

    assert row(keeper("running", 1), None, ledger).state == "unregistered"
    assert row(keeper("running", 2), None, ledger).state == "starting"


def test_record_of_an_earlier_run_says_nothing() -> None:
    assert row(keeper("running", 1), RECORD, RestartLedger({"w": RECORD})).state == "starting"


def test_plain_screen_prints_changes_only(capsys: pytest.CaptureFixture[str]) -> None:
    starting = row(keeper("running", 1), None, RestartLedger({}))
    ready = row(keeper("running", 1), RECORD, RestartLedger({}))
    with make_screen(progress=False) as screen:
        for rows in ([starting], [starting], [ready], [replace(ready, num_restarts=1)]):
            screen.show(rows)
        screen.echo("[news] of 2")

    assert (
        capsys.readouterr().out
        == "w: starting (log /logs/w.log)\nw: ready (http 127.0.0.1:8000)\n[news] of 2\n"
    )


def test_live_screen_draws_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        screen = LiveScreen(console, live)
        screen.show([row(keeper("running", 1), RECORD, RestartLedger({}))])
        screen.echo("news")

    assert "news" in (out := capsys.readouterr().out)
    assert "127.0.0.1:8000" in out


def test_screen_is_plain_in_a_pipe() -> None:
    with make_screen(progress=True) as screen:
        assert type(screen) is Screen
