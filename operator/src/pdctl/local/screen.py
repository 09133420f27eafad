"""Output of a run: a live table of workers on a terminal, plain lines in pipes and logs.

Both say the same things through `show` and `echo`; colours follow NO_COLOR.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdctl.local.rows import Row

_COLORS = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "unregistered": "yellow",
    "restarting": "red",
    "failed": "bold red",
}


class Screen(Protocol):
    """Function that takes an event of a cluster."""

    def show(self, rows: Sequence[Row]) -> None:
        """All workers, after a change."""

    def echo(self, text: str) -> None:
        """One piece of news; may hold several lines."""


class PlainScreen:
    """A line for every change of a worker's state."""

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
        """Print the workers whose state is another than last time."""
        for row in rows:
            if self._states.get(row.name) != row.state:
                self._states[row.name] = row.state
                self.echo(f"{row.name}: {row.state}{_where(row)}")

    def echo(self, text: str) -> None:
        """Print it."""
        self._console.print(text)


class LiveScreen:
    """A table that is redrawn in place, news scrolling above it."""

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
        """Redraw the table."""
        self._live.update(_table(rows), refresh=True)

    def echo(self, text: str) -> None:
        """Print it above the table."""
        self._console.print(text)


def make_screen(*, progress: bool) -> PlainScreen | LiveScreen:
    """A live screen when asked for and possible, else a plain one."""
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
