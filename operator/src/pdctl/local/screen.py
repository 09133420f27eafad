"""Output of a run: a live table on a terminal, plain lines in pipes and logs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
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


class Screen:
    """Prints a line for each change of a worker's state, and for each new note.

    A note is as in `disaggregating: True (Working): 8 of 9 prompts ...`: with other figures alone
    it is not new.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self._notes: set[str] = set()

    def show(self, rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
        for row in rows:
            if self._states.get(row.name) != row.state:
                self._states[row.name] = row.state
                self.echo(f"{row.name}: {row.state}{_where(row)}")
        titles = {note.partition("): ")[0]: note for note in notes}
        for title, note in titles.items():
            if title not in self._notes:
                self.echo(note)
        self._notes = set(titles)

    def echo(self, text: str) -> None:
        self._console.print(text)


class LiveScreen(Screen):
    def __init__(self, console: Console, live: Live) -> None:
        super().__init__(console)
        self._live = live

    def show(self, rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
        self._live.update(Group(_table(rows), *notes), refresh=True)


@contextmanager
def make_screen(*, progress: bool) -> Iterator[Screen]:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not (progress and console.is_terminal):
        yield Screen(console)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield LiveScreen(console, live)


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
