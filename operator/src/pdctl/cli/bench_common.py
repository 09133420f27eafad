"""Options of `pdctl bench`, their checks, and what its commands do with results and errors."""

import asyncio
import json
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from pdcluster_api.errors import StartError
from pdcluster_schema.load import load
from pdcluster_schema.pdcluster import PDCluster
from pdctl.bench.datasets import Lengths
from pdctl.bench.load import LatencyLimits
from pdctl.bench.measure import LocalCluster
from pdctl.bench.result import NAMES
from pdctl.cli.options import cannot_write
from pdctl.figures import check_name, require_matplotlib
from pdctl.local.model import find_model

ModelPath = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="the model's folder; else as `pdctl up` finds it"),
]
Seed = Annotated[int, typer.Option(help="of prompts and arrivals")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, help="0 = greedy")]
OutputJson = Annotated[
    Path | None, typer.Option(metavar="FILE", help="write the result there, as JSON")
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="draw the result there (.png, .svg), with its figures in FILE.json; needs matplotlib "
        "(the extra `plot`)",
    ),
]
NumPrompts = Annotated[int, typer.Option(min=1, help="how many requests")]
RequestTimeout = Annotated[
    float,
    typer.Option(
        "--request-timeout", min=0.1, metavar="SECONDS", help="for one answer, then it has failed"
    ),
]
DatasetName = Annotated[
    Literal["random", "custom", "sharegpt"],
    typer.Option(
        help="random token ids; custom: JSON lines with `prompt`; sharegpt: its JSON file"
    ),
]
DatasetPath = Annotated[
    Path | None, typer.Option(metavar="FILE", help="of a custom or sharegpt dataset")
]
InputLen = Annotated[
    int, typer.Option("--input-len", "--random-input-len", min=1, help="tokens of a random prompt")
]
OutputLen = Annotated[
    int,
    typer.Option("--output-len", "--random-output-len", min=1, help="tokens of an answer, at most"),
]

_LIMITS = {"ttft": "ttft_seconds", "tpot": "tpot_seconds", "e2el": "e2e_seconds"}


@dataclass(frozen=True)
class MeasuredCluster:
    cluster: PDCluster
    local: LocalCluster


def load_measured(file: Path, model_path: Path | None, lengths: Lengths | None) -> MeasuredCluster:
    """lengths: of random requests, which have to fit `maxModelLen`; None = not known.

    Raises InvalidObjectError, StartError.
    """
    cluster = load(file)
    limit = cluster.spec.engine.max_model_len
    if lengths is not None and limit is not None and lengths.longest > limit:
        message = (
            f"--input-len and --output-len: together {lengths.longest} tokens, and "
            f"spec.engine.maxModelLen is {limit}; lower them, or raise it in {file}"
        )
        raise StartError(message, exit_code=2)
    return MeasuredCluster(cluster, LocalCluster(file, find_model(cluster, file, model_path).path))


def slo_of(pairs: Sequence[str]) -> LatencyLimits | None:
    """Parse `ttft:2000`; one text may hold several.  Raises StartError.

    >>> slo_of(["ttft:2000 tpot:100"])
    LatencyLimits(ttft_seconds=2.0, tpot_seconds=0.1, e2e_seconds=None)
    """
    limits: dict[str, float] = {}
    for pair in " ".join(pairs).replace(",", " ").split():
        name, _, value = pair.partition(":")
        seconds = _seconds(value)
        if name not in _LIMITS or seconds is None:
            fix = "write ttft:MS, tpot:MS or e2el:MS with milliseconds above 0"
            raise StartError(f"--goodput: {pair!r} is no limit; {fix}", exit_code=2)
        limits[_LIMITS[name]] = seconds
    return LatencyLimits(**limits) if limits else None


def _seconds(text: str) -> float | None:
    try:
        value = float(text) / 1e3
    except ValueError:
        return None
    return value if value > 0 else None


def percentiles_of(text: str) -> list[float]:
    """Parse `50,90,99`.  Raises StartError."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if any(not 0 <= value <= 100 for value in values):
        message = f"--metric-percentiles: {text!r}; write numbers from 0 to 100, as in 50,90,99"
        raise StartError(message, exit_code=2)
    return values


def metrics_of(text: str) -> list[str]:
    """Parse `ttft,tpot`.  Raises StartError."""
    names = [name.strip() for name in text.split(",")]
    if wrong := [name for name in names if name not in NAMES]:
        message = f"--percentile-metrics: no {wrong[0]!r}; write names of {', '.join(NAMES)}"
        raise StartError(message, exit_code=2)
    return names


def required(path: Path | None) -> Path:
    if path is None:
        message = (
            "--dataset-path: not given; give the file of the prompts, or --dataset-name random"
        )
        raise StartError(message, exit_code=2)
    return path


Result = TypeVar("Result")


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
    """Raises StartError."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=4) + "\n")
    except OSError as e:
        raise cannot_write(path, e) from e


def check_plot(path: Path | None) -> None:
    """Raises StartError where it could not be drawn, before anything is measured."""
    if path is not None:
        check_name(path)
        require_matplotlib("go without --plot")


def check_out(path: Path | None) -> None:
    """Raises StartError where it could not be written, before anything is computed."""
    if path is None:
        return
    was_there = path.exists()
    try:
        path.open("a").close()
    except OSError as e:
        raise cannot_write(path, e) from e
    if not was_there:
        path.unlink()


def draw(path: Path | None, drawn: Callable[[Path], None]) -> None:
    """Raises StartError."""
    if path is None:
        return
    try:
        drawn(path)
    except OSError as e:
        raise cannot_write(path, e) from e
