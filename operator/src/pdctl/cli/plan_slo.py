"""`pdctl plan --slo`: placements of a model for an objective, and the PDCluster of the best."""

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pdcluster_api.errors import StartError
from pdcluster_schema.accelerators import accelerators
from pdcluster_schema.load import parse_applied
from pdctl.cli.bench_common import check_out, check_plot, draw
from pdctl.cli.options import cannot_write
from pdctl.cli.progress import shown_progress
from pdctl.cli.table import table
from pdctl.sizing.manifest import manifest_of, manifest_text
from pdctl.sizing.objective import Objective, OfferedLoad
from pdctl.sizing.profile import EngineProfile
from pdctl.sizing.profiles import LINK_BYTES, ModelProfiles, counted, slo_fault
from pdctl.sizing.report import (
    PlanReport,
    draw_front,
    front_rows,
    objective_text,
    placement_rows,
    plan_json,
    plan_lines,
    trace_texts,
)
from pdctl.sizing.roofline import can_estimate
from pdctl.sizing.search import Placement, SearchInput, best, fastest, placements
from pdctl.sizing.several_types import joined_placements
from pdctl.sizing.trace_report import PlannedTrace
from pdctl.sizing.workload import TraceWorkload, read_workload

_MAX_GPUS = 1024
_MAX_BLOCK_TOKENS = 1 << 20
_MAX_SECONDS = 604800.0  # of an objective, as in autoscale.objective
BLOCK_TOKENS = 512
_DEFAULTS = {"trace_block_tokens": BLOCK_TOKENS, "engine": "vllm", "as_json": False}

Engine = Literal["vllm", "sglang"]
ModelName = Annotated[
    str | None,
    typer.Option(metavar="NAME|FOLDER", help="with --slo: in the tables, or with a config.json"),
]
Gpus = Annotated[
    list[str] | None,
    typer.Option(metavar="TYPE=NUMBER", help="with --slo: at hand; may be given again"),
]
Input = Annotated[
    int | None, typer.Option("--input", metavar="TOKENS", help="with --slo: of a prompt")
]
Output = Annotated[
    int | None, typer.Option("--output", metavar="TOKENS", help="with --slo: of an answer")
]
Ttft = Annotated[float | None, typer.Option(metavar="SECONDS", help="with --slo: objective")]
Itl = Annotated[float | None, typer.Option(metavar="SECONDS", help="with --slo: objective")]
Percentile = Annotated[
    float | None, typer.Option(help="of both objectives, 50 to 99.9; else means")
]
Price = Annotated[
    list[str] | None,
    typer.Option(metavar="TYPE=PRICE", help="of a GPU and hour; may be given again"),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="with --slo: lengths and rates in place of --input and --output, by a file as of "
        "`pdctl simulate`",
    ),
]
TraceBlockTokens = Annotated[int, typer.Option(help="tokens of each block of the trace's hash_ids")]
RatePercentile = Annotated[
    float | None,
    typer.Option(
        help="of the time in which the fleet holds the trace's rate, 50 to 100 (its peak)"
    ),
]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE", help="write the PDCluster there, else print it")
]


@dataclass(frozen=True)
class SloOptions:
    """As they were given; None = not given."""

    model: str | None
    gpu: Sequence[str] | None
    input: int | None
    output: int | None
    ttft: float | None
    itl: float | None
    percentile: float | None
    price: Sequence[str] | None
    trace: Path | None
    rate_percentile: float | None
    trace_block_tokens: int
    engine: Engine
    out: Path | None
    plot: Path | None
    as_json: bool

    def given(self) -> Iterator[str]:
        """Options that are of --slo alone and do not have their defaults."""
        for each in fields(self):
            if getattr(self, each.name) not in (_DEFAULTS.get(each.name), []):
                yield "--json" if each.name == "as_json" else "--" + each.name.replace("_", "-")


def plan_for_objective(options: SloOptions) -> None:
    """Raises StartError, InvalidTraceError."""
    check_plot(options.plot)
    check_out(options.out)
    model, workload = _required(options), _workload(options)
    goal = _objective(options, workload)
    gpus = _counts(options.gpu or ())
    prices = _prices(options.price or (), gpus)
    found = ModelProfiles(model, options.engine, goal, gpus)
    with shown_progress() as shown:
        shown.begin("layouts", found.num_layouts)
        profiles = found.all(shown.step)
    links = {gpu: float(accelerators()[gpu].network_bytes or LINK_BYTES) for gpu in gpus}
    demand = None if workload is None else workload.demand(options.rate_percentile or 100.0)
    given = SearchInput(goal, gpus, links, found.prompt_kv_bytes, prices, demand)
    _check_speed_of_light(profiles, given)
    can_split = options.engine == "vllm"
    all_placements = [
        *placements(profiles, given, with_splits=can_split),
        *joined_placements(profiles, given, with_splits=can_split),
    ]
    sources = list(dict.fromkeys(profile.source for profile in profiles))
    trace = None
    if workload is not None:
        caches = [each.least_kv_tokens for each in profiles]
        trace = PlannedTrace(str(options.trace), workload, caches)
    report = PlanReport(model, given, all_placements, found.notes, sources, can_split, trace)
    chosen = report.chosen
    if not chosen:
        raise _none_fits(all_placements, profiles, given, can_split)
    planned = found.planned(Path(model).resolve().name, options.engine)
    document = manifest_of(planned, chosen[0], given)
    parse_applied(document)
    _print(report, document, options)


def _print(report: PlanReport, document: dict[str, Any], options: SloOptions) -> None:
    head = f"pdctl plan --slo: {report.model}, {objective_text(report.given.objective)}\n"
    head += "".join(f"{line}\n" for line in trace_texts(report))
    head += "An estimate: " + "; ".join(report.sources)
    head += "".join(f"\nWARNING: {text}" for text in report.chosen[0].warnings)
    text = manifest_text(document, head)
    if options.as_json:
        typer.echo(json.dumps(plan_json(report, document), indent=2))
    else:
        rows = [
            *table(*placement_rows(report), right=(2, 3, 4, 5, 6)),
            "",
            *table(*front_rows(report), right=(0, 1, 2)),
        ]
        typer.echo("\n".join(plan_lines(report, rows)))
        if options.out is None:
            typer.echo(f"\n---\n{text}", nl=False)
    if options.out is not None:
        try:
            options.out.write_text(text, encoding="utf-8")
        except OSError as e:
            raise cannot_write(options.out, e) from e
    draw(options.plot, lambda path: draw_front(path, report))


def _required(options: SloOptions) -> str:
    """The model."""
    lengths = () if options.trace else ("input", "output")
    names = ("model", "gpu", *lengths, "ttft", "itl")
    missing = [f"--{name}" for name in names if getattr(options, name) in (None, [], ())]
    if missing:
        raise slo_fault(f"--slo: needs {', '.join(missing)} too")
    return str(options.model)


def _workload(options: SloOptions) -> TraceWorkload | None:
    """Raises StartError, InvalidTraceError."""
    percentile, blocks = options.rate_percentile, options.trace_block_tokens
    if options.trace is None:
        if percentile is not None:
            raise slo_fault(
                "--rate-percentile: is of a trace's rate; give --trace, or leave it out"
            )
        return None
    for name in ("input", "output"):
        if getattr(options, name) is not None:
            raise slo_fault(f"--{name}: lengths are those of --trace; leave one of both out")
    if percentile is not None and not 50.0 <= percentile <= 100.0:
        raise slo_fault(
            f"--rate-percentile: is {percentile:g}; give 50 to 100, or leave it out for the peak"
        )
    if not 1 <= blocks <= _MAX_BLOCK_TOKENS:
        raise slo_fault(f"--trace-block-tokens: is {blocks}; give 1 to {_MAX_BLOCK_TOKENS}")
    return read_workload(options.trace, blocks)


def _objective(options: SloOptions, workload: TraceWorkload | None) -> Objective:
    for name in ("input", "output"):
        if workload is None and (tokens := getattr(options, name)) < 1:
            raise slo_fault(f"--{name}: is {tokens}; give tokens of a request, 1 or more")
    for name in ("ttft", "itl"):
        seconds = getattr(options, name)
        if not 0.0 < seconds < math.inf:
            raise slo_fault(f"--{name}: is {seconds:g}; give seconds above 0")
        if seconds > _MAX_SECONDS:
            raise slo_fault(f"--{name}: is {seconds:g}; give at most {_MAX_SECONDS:g} seconds")
    percentile = options.percentile
    if percentile is not None and not 50.0 <= percentile <= 99.9:
        raise slo_fault(
            f"--percentile: is {percentile:g}; give 50 to 99.9, or leave it out for means"
        )
    means, lengths = (options.input or 0, options.output or 0), None
    if workload is not None:
        means = round(workload.input_tokens), round(workload.output_tokens)
        lengths = workload.lengths
    return Objective(*means, options.ttft or 0, options.itl or 0, percentile, lengths)


def _pairs(name: str, texts: Sequence[str]) -> Iterator[tuple[str, float]]:
    for text in texts:
        gpu, _, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            raise slo_fault(f"--{name} {text}: write TYPE=NUMBER, as in B200=8") from None
        yield gpu, value


def _counts(texts: Sequence[str]) -> dict[str, int]:
    known = [name for name, each in accelerators().items() if can_estimate(each)]
    found: dict[str, int] = {}
    for gpu, number in _pairs("gpu", texts):
        if gpu not in known:
            if gpu in accelerators():
                names = {"memory": "memory_bytes", "bandwidth": "bandwidth_bytes"}
                names["BF16 rate"] = "bf16_flops"
                has = accelerators()[gpu]
                without = ", ".join(name for name, each in names.items() if not getattr(has, each))
                raise slo_fault(
                    f"--gpu {gpu}: has no known {without}; give one of {', '.join(known)}"
                )
            near = difflib.get_close_matches(gpu.upper(), known, 1, 0.0)[0]
            raise slo_fault(f"--gpu {gpu}: is not known; the nearest type with numbers is {near}")
        if not (1 <= number <= _MAX_GPUS and number.is_integer()):
            raise slo_fault(f"--gpu {gpu}={number:g}: give a whole number of 1 to {_MAX_GPUS}")
        if gpu in found:
            both = f"{found[gpu]} and {number:g}"
            raise slo_fault(f"--gpu {gpu}: is given twice, {both}; give it once, with their sum")
        found[gpu] = int(number)
    return found


def _prices(texts: Sequence[str], gpus: Mapping[str, int]) -> dict[str, float]:
    found: dict[str, float] = {}
    for gpu, price in _pairs("price", texts):
        if gpu not in gpus:
            raise slo_fault(f"--price {gpu}: is not at hand; give one of {', '.join(gpus)}")
        if not 0.0 < price < math.inf:
            raise slo_fault(f"--price {gpu}={price:g}: give a price above 0, or leave it out")
        if gpu in found:
            both = f"{found[gpu]:g} and {price:g}"
            raise slo_fault(f"--price {gpu}: is given twice, {both}; give one of them")
        found[gpu] = price
    if found and (without := [gpu for gpu in gpus if gpu not in found]):
        raise slo_fault(f"--price: {', '.join(without)} has none; give all types a price, or none")
    return found


def _check_speed_of_light(profiles: Sequence[EngineProfile], given: SearchInput) -> None:
    goal = given.objective
    limits = (("ttft", goal.ttft_seconds), ("itl", goal.itl_seconds))
    for (name, limit), least in zip(limits, fastest(profiles), strict=True):
        if limit < least:
            raise slo_fault(
                f"--{name} {limit:g}: no GPU here is so fast: one request alone takes "
                f"{least:.3g} s at best; give that or more" + _warnings_text(profiles)
            )


def _warnings_text(profiles: Sequence[EngineProfile]) -> str:
    """Reasons not to rely on an error that rests on these."""
    found = dict.fromkeys(profile.warning for profile in profiles if profile.warning)
    return "".join(f"; WARNING: {text}" for text in found)


def _none_fits(
    found: Sequence[Placement],
    profiles: Sequence[EngineProfile],
    given: SearchInput,
    can_split: bool,
) -> StartError:
    goal = given.objective
    if given.demand:
        without = replace(given, demand=None)
        smaller = placements(profiles, without, with_splits=can_split)
        if held := best(smaller, without):
            return _too_much_load(held, given, given.demand)
        found = smaller
    if found:
        least = min(one.itl_seconds for one in found)
        fix = f"within this TTFT the least ITL is {least:.3g} s"
    else:
        fix = f"one prompt alone takes {fastest(profiles)[0]:.3g} s; give a longer --ttft"
    fix += _warnings_text(profiles)
    return slo_fault(f"no placement holds {objective_text(goal)} on {counted(given.gpus)}: {fix}")


def _too_much_load(
    held: Sequence[Placement], given: SearchInput, demand: OfferedLoad
) -> StartError:
    """held: placements of all GPUs within both objectives."""
    most = max(held, key=lambda one: one.requests_per_second)
    needed = demand.requests_per_second
    times = max(needed / most.requests_per_second, 1.0 + 1.0 / most.gpus)
    gpus = ", ".join(f"{math.ceil(number * times)} {gpu}" for gpu, number in most.gpus_of.items())
    share = "its peak" if demand.percentile >= 100.0 else f"p{demand.percentile:g} of its rate"
    return slo_fault(
        f"--trace: {share} is {needed:.3g} requests/s, and {counted(given.gpus)} hold about "
        f"{most.requests_per_second:.3g} of its mean requests within "
        f"{objective_text(given.objective)}; give about {gpus}, or a lower --rate-percentile"
    )
