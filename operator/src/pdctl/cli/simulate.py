"""`pdctl simulate`: requests of a trace through a simulated PDCluster."""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdcluster_api.errors import StartError
from pdcluster_schema.faults import Fault, InvalidObjectError
from pdcluster_schema.pdcluster import PDCluster
from pdctl.cli.options import File, cannot_write, load_file, reported
from pdctl.cli.progress import shown_progress
from pdctl.cli.why import record_lines
from pdctl.figures import figures_path, require_matplotlib
from pdctl.simulation.speeds import Speeds

if TYPE_CHECKING:
    from pdctl.simulation.report import SimulationReport

INSTALL = "pip install 'pdcluster[simulate]'"
MAX_CELLS, MAX_PROCESSES = 4096, 256


@dataclass(frozen=True)
class SimulateOptions:
    """repeats: whether intervals of a steady load are repeated

    speeds: where no step times are given; None = those of the tables
    """

    cluster: PDCluster
    trace: Path
    autoscales: bool
    start_seconds: float
    out: Path | None
    plot: bool
    seed: str = "0"
    steps: tuple[Path, ...] = ()
    model: str | None = None
    speeds: Speeds | None = None
    repeats: bool = False
    cells: int = 1
    processes: int = 1
    first_ingress: bool = False
    block_tokens: int = 512
    rollout_at: float | None = None
    as_json: bool = False


def run_simulation(options: SimulateOptions) -> list[str]:
    """The lines to print.  Raises InvalidTraceError, InvalidObjectError, StartError."""
    if find_spec("pdcluster_simulator") is None:
        raise StartError(f"this needs the simulator: {INSTALL}", exit_code=1)
    if options.out is not None and options.plot:
        require_matplotlib("go without with --no-plot")
    _check_numbers(options)
    report = _simulated(options)
    from pdctl.simulation.report import report_json, report_lines

    lines = report_lines(report)
    if options.as_json:
        lines = [json.dumps(report_json(report))]
    if options.out is None:
        return lines
    try:
        written = _written(options, report, options.out)
    except OSError as e:
        raise cannot_write(options.out, e, "give another folder with --out") from e
    return lines if options.as_json else [*lines, *written]


def _check_numbers(options: SimulateOptions) -> None:
    for name, value, most in (
        ("--cells", options.cells, MAX_CELLS),
        ("--processes", options.processes, MAX_PROCESSES),
        ("--trace-block-tokens", options.block_tokens, 1 << 20),
    ):
        if not 1 <= value <= most:
            raise StartError(f"{name}: is {value}; give 1 to {most}", exit_code=2)
    if not 0.0 <= options.start_seconds < 1e9:
        message = f"--start-seconds: is {options.start_seconds:g}; give a finite number from 0 on"
        raise StartError(message, exit_code=2)
    if options.rollout_at is not None and options.cells > 1:
        message = f"--rollout-at: is for one cluster, and --cells is {options.cells}; give 1"
        raise StartError(message, exit_code=2)


def _check_rollout(options: SimulateOptions, seconds: float) -> None:
    at = options.rollout_at
    if at is not None and not 0.0 <= at < seconds:
        message = f"--rollout-at: is {at:g}, and the trace has {seconds:g} s; give 0 to less"
        raise StartError(message, exit_code=2)


def _autoscales(cluster: PDCluster, autoscale: bool | None) -> bool:
    """With mode On, or where it is asked for.  Raises InvalidObjectError without a section."""
    spec = cluster.spec
    if autoscale and "autoscale" not in spec.model_fields_set:
        fix = "give it the section, or leave --autoscale out"
        raise InvalidObjectError([Fault("spec.autoscale", "is not in the file", fix)])
    return spec.autoscale.mode == "On" if autoscale is None else autoscale


def _simulated(options: SimulateOptions) -> "SimulationReport":
    from pdcluster_simulator.cluster import cluster_model
    from pdcluster_simulator.results import over_time, summarize
    from pdcluster_simulator.run import Options, simulate
    from pdctl.simulation.inputs import (
        TimesSource,
        read_trace,
        sources_of,
        step_times,
        times_of_speeds,
    )
    from pdctl.simulation.report import SimulationReport, left_out, objectives_of

    trace = read_trace(options.trace, options.seed, options.block_tokens)
    _check_rollout(options, trace.seconds)
    spec = options.cluster.spec
    engine = spec.engine.type if spec.engine.is_stock else "vllm"
    if options.speeds is not None and not options.steps:
        times = times_of_speeds(spec, options.speeds)
    else:
        times = step_times(spec, TimesSource(options.steps, options.model, engine))
    model = cluster_model(
        options.cluster,
        times,
        trace,
        seed=options.seed,
        is_first_ingress_alone=options.first_ingress,
    )
    interval = float(spec.autoscale.interval_seconds)
    given = Options(
        interval,
        options.autoscales,
        options.repeats,
        options.start_seconds,
        options.cells,
        options.processes,
        options.rollout_at,
    )
    with shown_progress() as shown:
        shown.begin("requests", len(trace.requests))
        result = simulate(model, trace, given, shown.step)
    objectives = objectives_of(spec)
    return SimulationReport(
        options.cluster.metadata.name,
        summarize(result.recorder, *objectives),
        over_time(result.recorder, interval, *objectives),
        result,
        sources_of(times),
        left_out(model, has_rollout=result.rollout is not None),
        model.num_accelerators,
        options.cells,
    )


def _written(options: SimulateOptions, report: "SimulationReport", folder: Path) -> list[str]:
    from pdctl.simulation.plot import draw
    from pdctl.simulation.report import report_json, write_moments

    folder.mkdir(parents=True, exist_ok=True)
    stem = options.trace.stem
    written = [folder / f"{stem}.csv", folder / f"{stem}.json"]
    with written[0].open("w", newline="", encoding="utf-8") as file:
        write_moments(report, file)
    written[1].write_text(json.dumps(report_json(report)) + "\n", encoding="utf-8")
    if options.autoscales:
        written.append(folder / f"{stem}-decisions.txt")
        changes = [each.record for each in report.result.decisions if each.record is not None]
        blocks = ["\n".join(record_lines(report.name, None, each)) for each in changes]
        written[-1].write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    if options.plot and report.moments:
        picture = folder / f"{stem}.png"
        draw(report, options.cluster.spec, picture)
        written += [picture, figures_path(picture)]
    return [f"written              {path}" for path in written]


Steps = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE", help="measured step times of one type of accelerator; may be repeated"
    ),
]
TracePath = Annotated[
    Path,
    typer.Option(
        "--trace",
        metavar="TRACE",
        help="JSON lines of requests (timestamp, input_length, output_length, and hash_ids, as in "
        "Mooncake's traces), or the CSV of `autoscale replay`, whose requests are drawn",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FOLDER", help="for step times from tables of kernels, or a config.json"
    ),
]
Autoscale = Annotated[
    bool | None, typer.Option(help="follow spec.autoscale; by default where its mode is On")
]
FirstIngress = Annotated[
    bool,
    typer.Option(help="send all requests to the first decode worker, as `pdctl up` does"),
]
RolloutAt = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="of the trace, at which a roll out of another revision begins, by rollout.strategy",
    ),
]
OutFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="write a table, JSON and a picture there")
]


def simulate_command(
    file: File,
    trace: TracePath,
    *,
    steps: Steps = None,
    model: Model = None,
    cells: Annotated[int, typer.Option(help="clusters like the file's; requests go in turn")] = 1,
    processes: Annotated[int, typer.Option(help="that simulate them side by side")] = 2,
    autoscale: Autoscale = None,
    start_seconds: Annotated[float, typer.Option(help="until a new worker is ready")] = 120.0,
    rollout_at: RolloutAt = None,
    first_ingress: FirstIngress = False,
    trace_block_tokens: Annotated[
        int, typer.Option(help="tokens of each block of the trace's hash_ids")
    ] = 512,
    seed: Annotated[str, typer.Option(help="of arrivals and ties; the same gives the same")] = "0",
    out: OutFolder = None,
    plot: Annotated[
        bool, typer.Option(help="the picture; it needs matplotlib (the extra `plot`)")
    ] = True,
    output_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Run a trace of requests through a simulated cluster: its routing, its schedulers, its
    autoscaler, with measured or tabulated times of steps.
    """
    with reported(file, trace):
        cluster = load_file(file)
        options = SimulateOptions(
            cluster,
            trace,
            _autoscales(cluster, autoscale),
            start_seconds,
            out,
            plot,
            seed,
            tuple(steps or ()),
            model,
            cells=cells,
            processes=processes,
            first_ingress=first_ingress,
            block_tokens=trace_block_tokens,
            rollout_at=rollout_at,
            as_json=output_json,
        )
        typer.echo("\n".join(run_simulation(options)))
