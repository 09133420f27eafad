"""Shows on stderr how far long work is: by a bar with the time left on a terminal, else by a line
now and then.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichBar

LINE_SECONDS = 15.0
"""Between lines: work that is shorter prints none."""

_BAR_SECONDS = 0.2
_SPEED_SECONDS = 120.0  # steps come in bursts: answers of one batch, trials between starts
_REFRESHES_PER_SECOND = 4  # a load generator runs beside it


class Progress:
    """Prints lines, for pipes and logs."""

    shown_every_seconds = LINE_SECONDS

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin("")

    def begin(self, what: str, total: int | None = None) -> None:
        """The next stage, of so many steps; None = their number is not known."""
        self._what, self._total, self._num_done = what, total, 0
        self._start = self._shown = self._clock()

    def step(self, number: int = 1) -> None:
        self._num_done += number
        now = self._clock()
        if now - self._shown >= self.shown_every_seconds or self._num_done == self._total:
            self._shown = now
            self._show(now - self._start)

    def _show(self, seconds: float) -> None:
        if self._total is None or self._num_done == self._total:
            return
        text = f"{self._what}: {self._num_done} of {self._total} in {seconds:.0f} s"
        if self._num_done:
            left = seconds / self._num_done * (self._total - self._num_done)
            text += f", about {left:.0f} s left"
        typer.echo(text, err=True)


class _BarProgress(Progress):
    shown_every_seconds = _BAR_SECONDS

    def __init__(self, bar: RichBar) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None, visible=False)
        super().__init__()

    def begin(self, what: str, total: int | None = None) -> None:
        super().begin(what, total)
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=total, visible=bool(what))

    def _show(self, seconds: float) -> None:
        self._bar.update(self._task, completed=self._num_done)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    console = Console(stderr=True)
    if not console.is_interactive:
        yield Progress()
        return
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(separator=" of ")),
        *(TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()),
    )
    with RichBar(
        *columns,
        console=console,
        refresh_per_second=_REFRESHES_PER_SECOND,
        speed_estimate_period=_SPEED_SECONDS,
        transient=True,
    ) as bar:
        yield _BarProgress(bar)
