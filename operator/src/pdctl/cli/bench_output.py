"""Errors, signals, JSON and pictures, common to the commands of `pdctl bench`."""

import asyncio
import json
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer

from pdcluster_api.errors import InvalidTraceError, StartError
from pdcluster_schema.errors import InvalidObjectError
from pdctl.bench.request_results import LoadResult
from pdctl.bench.svg import Panel, distribution, picture
from pdctl.cli.refusals import failed, refused

Result = TypeVar("Result")


@contextmanager
def reported(source: Path | str) -> Iterator[None]:
    """Prints errors with `source` and exits with their code."""
    try:
        yield
    except (InvalidObjectError, InvalidTraceError) as e:
        raise refused(Path(source), e.faults) from e
    except StartError as e:
        raise failed(e) from e
    except OSError as e:
        message = f"{e.filename}: cannot be written: {e.strerror}; give another path"
        raise failed(StartError(message, exit_code=1)) from e


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run until done; SIGINT, SIGTERM and SIGHUP cancel it, and the command exits with 130."""
    try:
        return asyncio.run(_ended_by_signals(work))
    except (KeyboardInterrupt, asyncio.CancelledError) as e:
        typer.echo("stopped before its end; nothing is left running", err=True)
        raise typer.Exit(130) from e


async def _ended_by_signals(work: Coroutine[Any, Any, Result]) -> Result:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await work


def write_result(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=4) + "\n")


def draw(path: Path | None, title: str, panels: list[Panel]) -> None:
    if path is not None:
        path.write_text(picture(title, panels))


def latency_panels(whole: LoadResult) -> list[Panel]:
    return [
        Panel(
            f"{name.upper()}: share of values at most so long",
            "ms",
            [distribution(name.upper(), [1e3 * value for value in values])],
        )
        for name, values in whole.latencies_seconds.items()
        if values and name != "e2el"
    ]
