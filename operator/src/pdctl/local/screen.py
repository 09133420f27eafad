"""Output of a run: a live table on a terminal, plain lines in pipes and logs."""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdctl.local.watcher import Row

_COLORS = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "unregistered": "yellow",
    "restarting": "red",
    "failed": "bold red",
}


class Screen(Protocol):
    def show(self, rows: Sequence[Row]) -> None:
        pass

    def echo(self, text: str) -> None:
        pass


class PlainScreen:
    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._states: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def show(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if self._states.get(row.name) != row.state:
                self._states[row.name] = row.state
                self.echo(f"{row.name}: {row.state}{_where(row)}")

    def echo(self, text: str) -> None:
        self._console.print(text)


class LiveScreen:
    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, rows: Sequence[Row]) -> None:
        self._live.update(_table(rows), refresh=True)

    def echo(self, text: str) -> None:
        self._console.print(text)


def make_screen(*, progress: bool) -> PlainScreen | LiveScreen:
    return LiveScreen() if progress and Console().is_terminal else PlainScreen()


def _where(row: Row) -> str:
    http = row.addresses.get("http")
    return (
        f" (http {http})"
        if http and row.is_ready
        else f" (log {row.log})"
        if row.state == "starting"
        else ""
    )


def _table(rows: Sequence[Row]) -> Table:
    table = Table("worker", "state", "http", "restarts", "log", box=None, header_style="dim")
    for row in rows:
        state = Text(row.state, style=_COLORS.get(row.state, ""))
        table.add_row(
            row.name, state, row.addresses.get("http", ""), str(row.num_restarts), row.log.name
        )
    return table
