"""`pdctl autoscale replay`: figures to the screen, a table, decisions and a picture to a folder."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from pdcluster_schema.accelerators import accelerators_text
from pdcluster_schema.pdcluster import PDCluster, PDClusterSpec
from pdctl.cli.options import cannot_write, load_file, reported, required_file
from pdctl.cli.progress import shown_progress
from pdctl.cli.why import record_lines
from pdctl.figures import figures_path, require_matplotlib
from pdctl.replay.plot import draw
from pdctl.replay.queueing import ESTIMATED, Speeds
from pdctl.replay.report import summarize, summary_lines, write_table
from pdctl.replay.run import Moment, replay
from pdctl.replay.trace import read_trace

autoscale = typer.Typer(help="Try the autoscaler without a cluster.", no_args_is_help=True)


@dataclass(frozen=True)
class ReplayRequest:
    """out: folder for the files; None = figures only."""

    trace: Path
    cluster: PDCluster
    speeds: Speeds
    out: Path | None
    with_plot: bool


def run_replay(request: ReplayRequest) -> list[str]:
    """The lines to print.  Raises InvalidTraceError, InvalidObjectError, StartError."""
    if request.out is not None and request.with_plot:
        require_matplotlib("go without with --no-plot")
    spec = request.cluster.spec
    trace, moments = read_trace(request.trace), list[Moment]()
    with shown_progress() as shown:
        interval = spec.autoscale.interval_seconds
        shown.begin("intervals", math.ceil(trace.duration_seconds / interval))
        for moment in replay(spec, trace, request.speeds):
            moments.append(moment)
            shown.step()
    lines = summary_lines(summarize(moments, float(spec.autoscale.interval_seconds)))
    lines += _speeds_remark(spec, request.speeds)
    if request.out is None:
        return lines
    try:
        return [*lines, *_written(request, moments, request.out)]
    except OSError as e:
        raise cannot_write(request.out, e, "give another folder with --out") from e


def _speeds_remark(spec: PDClusterSpec, speeds: Speeds) -> list[str]:
    """Warns where a default speed was estimated for another accelerator than the first pool's."""
    defaults = Speeds()
    decode = (speeds.step_seconds, speeds.stream_seconds, speeds.kv_tokens)
    is_default = {
        "prefill": speeds.prefill_tokens_per_second == defaults.prefill_tokens_per_second,
        "decode": decode == (defaults.step_seconds, defaults.stream_seconds, defaults.kv_tokens),
    }
    pools = {role: declared.pools[0] for role, declared in spec.roles.present().items()}
    firsts = {
        role: accelerators_text(pool.gpu, spec.gpus_per_replica(role, pool))
        for role, pool in pools.items()
    }
    wrong = [
        f"{firsts[role]} as for {gpu}"
        for role, gpu in ESTIMATED.items()
        if is_default[role] and firsts[role] != gpu
    ]
    if not wrong:
        return []
    return [
        f"estimated speeds     taken for {' and '.join(wrong)}: give your own before you believe a "
        "figure (see --help)"
    ]


def _written(request: ReplayRequest, moments: list[Moment], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    stem = request.trace.stem
    written = [folder / f"{stem}.csv", folder / f"{stem}-decisions.txt"]
    with written[0].open("w", newline="", encoding="utf-8") as file:
        write_table(moments, file)
    name = request.cluster.metadata.name
    blocks = [
        "\n".join(record_lines(name, None, moment.record))
        for moment in moments
        if moment.record is not None
    ]
    written[1].write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    if request.with_plot:
        picture = folder / f"{stem}.png"
        draw(moments, request.cluster.spec, f"{name}: {stem}", picture)
        written += [picture, figures_path(picture)]
    return [f"written              {path}" for path in written]


@autoscale.callback()
def _group() -> None:
    """Keeps `replay` a subcommand while it is the only one."""


@autoscale.command("replay")
def replay_command(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="CSV: seconds,requests_per_second,input_tokens,output_tokens"
        ),
    ],
    file: Annotated[Path, required_file("a PDCluster with a section autoscale")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="write a table, the decisions and a picture there"),
    ] = None,
    plot: Annotated[
        bool, typer.Option(help="the picture; it needs matplotlib (the extra `plot`)")
    ] = True,
    prefill_tokens_per_second: Annotated[
        float, typer.Option(help="of a busy prefill worker")
    ] = Speeds.prefill_tokens_per_second,
    step_seconds: Annotated[
        float, typer.Option(help="of a decode step with one stream")
    ] = Speeds.step_seconds,
    stream_seconds: Annotated[
        float, typer.Option(help="that each further stream adds to a step")
    ] = Speeds.stream_seconds,
    kv_tokens: Annotated[
        float, typer.Option(help="that a decode worker's KV cache holds")
    ] = Speeds.kv_tokens,
    start_seconds: Annotated[
        float, typer.Option(help="until a new worker is ready")
    ] = Speeds.start_seconds,
) -> None:
    """Run a trace of load through the autoscaler of a file, on a simulated cluster."""
    with reported(file, trace):
        speeds = Speeds(
            prefill_tokens_per_second, step_seconds, stream_seconds, kv_tokens, start_seconds
        )
        request = ReplayRequest(trace, load_file(file), speeds, out, with_plot=plot)
        typer.echo("\n".join(run_replay(request)))
