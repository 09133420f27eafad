"""`pdctl plan --slo`: placements of a model for an objective, and the PDCluster of the best."""

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from pdctl.sizing import tables
from pdctl.sizing.layouts import layouts_of, uneven_notes
from pdctl.sizing.manifest import PlannedModel, manifest_of, manifest_text
from pdctl.sizing.report import (
    PlanReport,
    draw_front,
    front_rows,
    objective_text,
    placement_rows,
    plan_json,
    plan_lines,
)
from pdctl.sizing.roofline import SOURCE, can_estimate, roofline_profile, sequence_kv_bytes
from pdctl.sizing.search import (
    EngineProfile,
    Objective,
    Placement,
    RankLayout,
    SearchInput,
    fastest,
    placements,
)
from pdctl.sizing.shape import read_shape

_MAX_RANKS = 8  # of one worker: a node; GB200 and GB300 have nodes of four
_NODES = {"GB200": 4, "GB300": 4}
_MAX_GPUS = 1024
_LINK_BYTES = 50e9  # where the table has none: a network card of 400 Gbit/s for each GPU

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
    engine: Engine
    out: Path | None
    plot: Path | None
    as_json: bool

    def given(self) -> Iterator[str]:
        """Options that are of --slo alone."""
        for name in ("model", "gpu", "input", "output", "ttft", "itl", "percentile", "price"):
            if getattr(self, name):
                yield f"--{name}"


def plan_for_objective(options: SloOptions) -> None:
    """Raises StartError."""
    check_plot(options.plot)
    check_out(options.out)
    model, goal = _required(options), _objective(options)
    gpus = _counts(options.gpu or ())
    prices = _prices(options.price or (), gpus)
    found = _Profiles(model, options.engine, goal, gpus)
    profiles = found.all()
    links = {gpu: float(accelerators()[gpu].network_bytes or _LINK_BYTES) for gpu in gpus}
    given = SearchInput(goal, gpus, links, found.prompt_kv_bytes, prices)
    _check_speed_of_light(profiles, given)
    can_split = options.engine == "vllm"
    all_placements = placements(profiles, given, with_splits=can_split)
    sources = list(dict.fromkeys(profile.source for profile in profiles))
    report = PlanReport(model, given, all_placements, found.notes, sources, can_split)
    chosen = report.chosen
    if not chosen:
        raise _none_fits(all_placements, profiles, given)
    planned = found.planned(Path(model).resolve().name, options.engine)
    document = manifest_of(planned, chosen[0], given)
    parse_applied(document)
    _print(report, document, options)


def _print(report: PlanReport, document: dict[str, Any], options: SloOptions) -> None:
    head = f"pdctl plan --slo: {report.model}, {objective_text(report.given.objective)}\n"
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


def _fault(message: str) -> StartError:
    return StartError(message, exit_code=2)


def _required(options: SloOptions) -> str:
    """The model."""
    names = ("model", "gpu", "input", "output", "ttft", "itl")
    missing = [f"--{name}" for name in names if getattr(options, name) in (None, [], ())]
    if missing:
        raise _fault(f"--slo: needs {', '.join(missing)} too")
    return str(options.model)


def _objective(options: SloOptions) -> Objective:
    for name in ("input", "output"):
        if (tokens := getattr(options, name)) < 1:
            raise _fault(f"--{name}: is {tokens}; give tokens of a request, 1 or more")
    for name in ("ttft", "itl"):
        seconds = getattr(options, name)
        if not 0.0 < seconds < math.inf:
            raise _fault(f"--{name}: is {seconds:g}; give seconds above 0")
    percentile = options.percentile
    if percentile is not None and not 50.0 <= percentile <= 99.9:
        raise _fault(f"--percentile: is {percentile:g}; give 50 to 99.9, or leave it out for means")
    return Objective(
        options.input or 0, options.output or 0, options.ttft or 0, options.itl or 0, percentile
    )


def _pairs(name: str, texts: Sequence[str]) -> Iterator[tuple[str, float]]:
    for text in texts:
        gpu, _, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            raise _fault(f"--{name} {text}: write TYPE=NUMBER, as in B200=8") from None
        yield gpu, value


def _counts(texts: Sequence[str]) -> dict[str, int]:
    known = [name for name, each in accelerators().items() if can_estimate(each)]
    found: dict[str, int] = {}
    for gpu, number in _pairs("gpu", texts):
        if gpu not in known:
            why = "has no numbers" if gpu in accelerators() else "is not known"
            near = difflib.get_close_matches(gpu.upper(), known, 1, 0.0)[0]
            raise _fault(f"--gpu {gpu}: {why}; the nearest type with numbers is {near}")
        if not (1 <= number <= _MAX_GPUS and number.is_integer()):
            raise _fault(f"--gpu {gpu}={number:g}: give a whole number of 1 to {_MAX_GPUS}")
        if gpu in found:
            both = f"{found[gpu]} and {number:g}"
            raise _fault(f"--gpu {gpu}: is given twice, {both}; give it once, with their sum")
        found[gpu] = int(number)
    return found


def _prices(texts: Sequence[str], gpus: Mapping[str, int]) -> dict[str, float]:
    found: dict[str, float] = {}
    for gpu, price in _pairs("price", texts):
        if gpu not in gpus:
            raise _fault(f"--price {gpu}: is not at hand; give one of {', '.join(gpus)}")
        if not 0.0 < price < math.inf:
            raise _fault(f"--price {gpu}={price:g}: give a price above 0, or leave it out")
        if gpu in found:
            both = f"{found[gpu]:g} and {price:g}"
            raise _fault(f"--price {gpu}: is given twice, {both}; give one of them")
        found[gpu] = price
    if found and (without := [gpu for gpu in gpus if gpu not in found]):
        raise _fault(f"--price: {', '.join(without)} has none; give all types a price, or none")
    return found


class _Profiles:
    """From the tables where they know model and type, else by our roofline, which a note says."""

    def __init__(
        self, model: str, engine: Engine, goal: Objective, gpus: Mapping[str, int]
    ) -> None:
        self.notes: list[str] = []
        self._goal, self._gpus = goal, gpus
        self._tables = self._known(model, engine)
        self._shape = self._tables.shape if self._tables else read_shape(Path(model))
        self._unfit: list[str] = []
        if unknown := [gpu for gpu in gpus if accelerators()[gpu].network_bytes is None]:
            self.notes.append(
                f"{', '.join(unknown)}: the network is not known; taken as {_LINK_BYTES / 1e9:g} "
                "GB/s for each GPU."
            )

    @property
    def prompt_kv_bytes(self) -> float:
        return self._kv_bytes(self._goal.input_tokens)

    def _kv_bytes(self, num_tokens: int) -> float:
        if self._tables and self._tables.kv_bytes:
            return self._tables.sequence_kv_bytes(num_tokens)
        return sequence_kv_bytes(self._shape, num_tokens)

    def planned(self, folder: str, engine: Engine) -> PlannedModel:
        has_fp8_kv = self._tables is not None and self._tables.has_fp8_kv
        return PlannedModel(folder, engine, has_fp8_kv, self._shape.max_length)

    def _known(self, model: str, engine: Engine) -> tables.SiliconTables | None:
        """None = by roofline."""
        is_folder = Path(model).is_dir()
        if is_folder:
            read_shape(Path(model))
        if not tables.is_installed():
            if not is_folder:
                raise _fault(
                    f"--model {model}: names are of the tables of {tables.PACKAGE}, which is not "
                    f"installed: {tables.INSTALL}; or give the model's folder, for our roofline"
                )
            self.notes.append(f"Measured tables are not installed: {tables.INSTALL}.")
            return None
        if is_folder:
            return tables.SiliconTables(model, engine)
        known, short = tables.known_models(), tables.short_name(model)
        if short not in known:
            near = difflib.get_close_matches(short, known, 1, 0.0)[0]
            raise _fault(
                f"--model {model}: no table knows it; the nearest is {near} ({known[near]}); or "
                "give the folder with its config.json, which our roofline serves"
            )
        if tables.short_name(known[short]) != short:
            self.notes.append(f"{model} is taken for {known[short]}, which has its shape.")
        return tables.SiliconTables(known[short], engine)

    def all(self) -> list[EngineProfile]:
        """Raises StartError where no worker holds the model."""
        found: list[EngineProfile] = []
        with shown_progress() as shown:
            shown.begin("types of accelerators", len(self._gpus))
            for gpu in self._gpus:
                found += self._of(gpu)
                shown.step()
        if self._tables:
            for hole, where in self._tables.holes.items():
                self.notes.append(f"Hole in the tables: {', '.join(where)}: {hole.rstrip('.')}.")
            self._unfit += self._tables.unfit
            self.notes += self._measured_notes()
        self.notes += uneven_notes(self._shape, max(map(self._most, self._gpus)))
        if not found:
            raise self._does_not_fit()
        if self._unfit:
            self.notes.append(f"Too large for one worker's memory: {', '.join(self._unfit)}.")
        return found

    def _measured_notes(self) -> Iterator[str]:
        measured = self._tables.measured if self._tables else {}
        if shares := [f"{name} {share:.0%}" for name, share in measured.items()]:
            yield (
                f"Share of a step's time from kernels measured for this very shape: "
                f"{', '.join(shares)}; the package interpolates or derives the rest."
            )

    def _most(self, gpu: str) -> int:
        """Ranks of one worker."""
        return min(self._gpus[gpu], _NODES.get(gpu, _MAX_RANKS))

    @property
    def _request_bytes(self) -> float:
        return self._kv_bytes(self._goal.input_tokens + self._goal.output_tokens)

    def _of(self, gpu: str) -> list[EngineProfile]:
        layouts = layouts_of(self._shape, self._most(gpu))
        if self._tables and gpu in tables.SYSTEMS:
            found = self._tables.profiles(gpu, layouts, self._goal)
            without = [each for each in self._tables.unfit if each.startswith(f"{gpu} ")]
            if found or len(without) == len(layouts):
                return found
        if self._tables:
            self.notes.append(f"{gpu}: the tables have no step of this model; taken from {SOURCE}.")
        if not self._shape.kv.is_known:
            raise _fault(
                f"--model: {gpu} would be taken from {SOURCE}, which does not know the cache of "
                "this model; leave the type out, or give a model whose layers keep plain KV"
            )
        accelerator = accelerators()[gpu]
        return [
            profile
            for layout in layouts
            if (profile := self._by_roofline(gpu, accelerator, layout)) is not None
        ]

    def _by_roofline(self, gpu: str, accelerator: Any, layout: RankLayout) -> EngineProfile | None:
        profile = roofline_profile(gpu, accelerator, layout, self._shape, self._goal)
        if profile is None:
            self._unfit.append(f"{gpu} {layout}")
        return profile

    def _does_not_fit(self) -> StartError:
        weights = self._shape.weights * self._shape.weight_bytes
        memory = {gpu: accelerators()[gpu].memory_bytes or 1 for gpu in self._gpus}
        gpu = max(memory, key=lambda name: memory[name])
        if any(weights < tables.MEMORY_SHARE * memory[each] * self._most(each) for each in memory):
            return _fault(
                f"--input: no worker holds the weights, {weights / 1e9:.0f} GB, and the KV of one "
                f"request, {self._request_bytes / 1e9:.3g} GB, on {_counted(self._gpus)}; give "
                "fewer tokens, or more GPUs for a worker"
            )
        needed = 1 << math.ceil(math.log2(weights / (tables.MEMORY_SHARE * memory[gpu])))
        return _fault(
            f"--gpu: no worker holds the model: its weights are {weights / 1e9:.0f} GB, and "
            f"{_counted(self._gpus)} have {memory[gpu] / 1e9:.0f} GB each at most; a worker of "
            f"{max(2, needed)} {gpu} would hold them, or weights of fewer bits"
        )


def _counted(gpus: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {gpu}" for gpu, number in gpus.items())


def _check_speed_of_light(profiles: Sequence[EngineProfile], given: SearchInput) -> None:
    goal = given.objective
    limits = (("ttft", goal.ttft_seconds), ("itl", goal.itl_seconds))
    for (name, limit), least in zip(limits, fastest(profiles), strict=True):
        if limit < least:
            raise _fault(
                f"--{name} {limit:g}: no GPU here is so fast: one request alone takes "
                f"{least:.3g} s at best; give that or more" + _warnings_text(profiles)
            )


def _warnings_text(profiles: Sequence[EngineProfile]) -> str:
    """Reasons not to rely on an error that rests on these."""
    found = dict.fromkeys(profile.warning for profile in profiles if profile.warning)
    return "".join(f"; WARNING: {text}" for text in found)


def _none_fits(
    found: Sequence[Placement], profiles: Sequence[EngineProfile], given: SearchInput
) -> StartError:
    goal = given.objective
    if found:
        least = min(one.itl_seconds for one in found)
        fix = f"within this TTFT the least ITL is {least:.3g} s"
    else:
        fix = f"one prompt alone takes {fastest(profiles)[0]:.3g} s; give a longer --ttft"
    fix += _warnings_text(profiles)
    return _fault(f"no placement holds {objective_text(goal)} on {_counted(given.gpus)}: {fix}")
