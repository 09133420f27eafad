"""A plan as text, as JSON and as a plot: placements, the front, and whether a split pays."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdctl.figures import Curve, Panel, draw_curves
from pdctl.sizing.objective import Objective
from pdctl.sizing.search import Kind, Placement, SearchInput, best, front
from pdctl.sizing.trace_report import PlannedTrace, trace_json, trace_lines

_SHOWN = 5
_ERROR = 0.4  # up to it both kinds differ from AIConfigurator's, without a warning: bench/results
_SPEEDS = (10, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300)
_KINDS: tuple[Kind, Kind] = ("aggregated", "split")


@dataclass(frozen=True)
class PlanReport:
    """found: placements within the TTFT objective; notes: holes, and what was taken in place."""

    model: str
    given: SearchInput
    found: Sequence[Placement]
    notes: Sequence[str]
    sources: Sequence[str]
    can_split: bool = True
    trace: PlannedTrace | None = None

    @property
    def chosen(self) -> list[Placement]:
        """Within both objectives, best first."""
        return best(self.found, self.given)

    def of_kind(self, kind: Kind) -> Placement | None:
        return next(iter(best(self.found, self.given, kind)), None)

    @property
    def warnings(self) -> list[str]:
        return list(dict.fromkeys(text for one in self.found for text in one.warnings))

    @property
    def fronts(self) -> Mapping[Kind, list[Placement]]:
        return {kind: front(self.found, kind) for kind in _KINDS}


Rows = tuple[Sequence[str], list[Sequence[str]]]


def objective_text(goal: Objective) -> str:
    each = " in the mean" if goal.lengths else ""
    what = "means" if goal.percentile is None else f"p{goal.percentile:g}"
    return (
        f"{goal.input_tokens} tokens in, {goal.output_tokens} out{each}, {what} of TTFT <= "
        f"{goal.ttft_seconds:g} s and ITL <= {goal.itl_seconds:g} s"
    )


def placement_rows(report: PlanReport) -> Rows:
    """Header and rows; FROM names the sources by their letters."""
    prices = report.given.prices
    header = ["PLACEMENT", "WORKERS", "GPUS", "TOK/S/GPU", "TOK/S", "TTFT", "ITL", "FROM"]
    if prices:
        header[-1:] = ["COST/H", "COST/1M", "FROM"]
    rows: list[Sequence[str]] = []
    for one in _shown(report.chosen):
        row = [
            one.kind,
            ", ".join(_workers(one)),
            str(one.gpus),
            f"{one.per_gpu:.0f}",
            f"{one.tokens_per_second:.0f}",
            f"{one.ttft_seconds:.2f}",
            f"{one.itl_seconds:.4f}",
        ]
        if prices:
            row += _costs(one, prices)
        rows.append([*row, _letters(one, report.sources) + "!" * bool(one.warnings)])
    return header, rows


def _shown(chosen: Sequence[Placement]) -> list[Placement]:
    """The best of each kind and GPU types, and the next best up to a few in all."""
    firsts: dict[object, Placement] = {}
    for one in chosen:
        firsts.setdefault((one.kind, *(role.profile.gpu for role in one.roles)), one)
    kept = list(firsts.values())
    kept += [one for one in chosen if one not in kept][: max(0, _SHOWN - len(kept))]
    return [one for one in chosen if one in kept]


def _workers(one: Placement) -> Iterator[str]:
    for role in one.roles:
        name = "" if role.role == "mixed" else f"{role.role} "
        yield f"{name}{role.workers} x {role.profile.gpu} {role.profile.layout} b{role.batch}"


def _costs(one: Placement, prices: Mapping[str, float]) -> list[str]:
    cost = one.cost_per_hour(prices)
    if cost is None:
        return ["-", "-"]
    return [f"{cost:.2f}", f"{cost_per_million(one, cost):.3f}"]


def cost_per_million(one: Placement, cost_per_hour: float) -> float:
    """Price of a million output tokens."""
    return cost_per_hour / (one.tokens_per_second * 3600.0) * 1e6


def _letters(one: Placement, sources: Sequence[str]) -> str:
    used = {role.profile.source for role in one.roles}
    return "".join(chr(ord("a") + number) for number, name in enumerate(sources) if name in used)


def source_lines(report: PlanReport) -> list[str]:
    return [
        f"{chr(ord('a') + number)}: an estimate, not a measurement: {name}"
        for number, name in enumerate(report.sources)
    ]


def front_rows(report: PlanReport) -> Rows:
    """Most tokens/s per GPU of both kinds at speeds of a stream, whatever the ITL objective.

    `!` marks a figure with a warning.
    """
    fronts = report.fronts
    rows: list[Sequence[str]] = []
    for speed in _SPEEDS:
        points = [_at_speed(fronts[kind], speed) for kind in _KINDS]
        values = [one.per_gpu if one else 0.0 for one in points]
        if any(points):
            better = _KINDS[values[1] > values[0]]
            rows.append([str(speed), *map(_front_text, points), better])
    return ("TOK/S OF A STREAM", "AGGREGATED, TOK/S/GPU", "SPLIT, TOK/S/GPU", "BETTER"), rows


def _at_speed(points: Sequence[Placement], speed: float) -> Placement | None:
    """None is so fast."""
    fast = [one for one in points if one.per_user >= speed]
    return max(fast, key=lambda one: one.per_gpu, default=None)


def _front_text(one: Placement | None) -> str:
    return f"{one.per_gpu:.0f}{'!' * bool(one.warnings)}" if one else "-"


def split_text(report: PlanReport) -> str:
    """The advice to split or not, with both figures, and what makes them wrong."""
    compared = [one for kind in _KINDS if (one := report.of_kind(kind))]
    wrong = dict.fromkeys(text for one in compared for text in one.warnings)
    return " ".join([_advice(report), *(f"WARNING: {text}." for text in wrong)])


def _advice(report: PlanReport) -> str:
    if not report.can_split:
        return "Not split: PDCluster splits with vllm alone; workers of sglang move no KV."
    prices = report.given.prices
    unit = "tokens/s per unit of price and hour" if prices else "tokens/s per GPU"
    aggregated, split = (report.of_kind(kind) for kind in _KINDS)
    if split is None or aggregated is None:
        if split is not None:
            return f"Split: {_figure(split, report)} {unit}; no aggregated placement meets both."
        return "Do not split: no split placement meets both objectives, and an aggregated one does."
    better, worse = sorted((aggregated, split), key=lambda one: -one.value(prices))
    gain = better.value(prices) / worse.value(prices) - 1.0
    is_sure = gain > _ERROR and not (better.warnings or worse.warnings)
    advice = "Split" if better is split else "Do not split"
    return (
        f"{advice}: {better.kind} gives {_figure(better, report)} {unit}, {worse.kind} "
        f"{_figure(worse, report)} ({gain:+.0%})."
        + ("" if is_sure else " That is within the error of these estimates: measure both.")
    )


def _figure(one: Placement, report: PlanReport) -> str:
    value = one.value(report.given.prices)
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def plan_lines(report: PlanReport, tables: Sequence[str]) -> list[str]:
    """tables: the placements and the front, drawn."""
    goal = report.given.objective
    at_hand = ", ".join(f"{number} {gpu}" for gpu, number in report.given.gpus.items())
    lines = [f"{report.model} on {at_hand}: {objective_text(goal)}", "", *tables, ""]
    marks = [f"!: {text}." for text in report.warnings]
    texts = [
        *trace_texts(report),
        split_text(report),
        *marks,
        _method_text(report),
        *source_lines(report),
    ]
    texts += report.notes
    return [*lines, *(line for text in texts for line in textwrap.wrap(text, 100))]


def trace_texts(report: PlanReport) -> list[str]:
    return [] if report.trace is None else list(trace_lines(report.trace, report.given))


def _method_text(report: PlanReport) -> str:
    given = report.given
    goal = given.objective
    links = ", ".join(f"{gpu} {rate / 1e9:g} GB/s" for gpu, rate in given.links.items())
    text = (
        f"TTFT has the wait for prefill ({'M/G/n' if goal.lengths else 'M/D/n'}) and, in a split, "
        f"{given.prompt_kv_bytes / 1e6:.0f} MB of KV for each GPU of the narrower rank at the "
        f"slower link of both types ({links}); ITL is "
    )
    if goal.percentile is None:
        return text + "the mean step. Both are means: --percentile plans for one."
    return text + f"the step at p{goal.percentile:g} of a worker's streams (Poisson)."


def plan_json(report: PlanReport, manifest: Mapping[str, Any]) -> dict[str, Any]:
    prices, goal = report.given.prices, report.given.objective
    return {
        "model": report.model,
        "objective": {name: value for name, value in vars(goal).items() if name != "lengths"},
        "trace": None if report.trace is None else trace_json(report.trace, report.given),
        "gpus": dict(report.given.gpus),
        "is_estimate": True,
        "sources": list(report.sources),
        "links_bytes_per_second": dict(report.given.links),
        "warnings": report.warnings,
        "notes": list(report.notes),
        "advice": split_text(report),
        "placements": [_as_json(one, prices) for one in report.chosen],
        "front": {
            kind: [
                {"per_user": one.per_user, "per_gpu": one.per_gpu, "warnings": one.warnings}
                for one in points
            ]
            for kind, points in report.fronts.items()
        },
        "manifest": manifest,
    }


def _as_json(one: Placement, prices: Mapping[str, float]) -> dict[str, Any]:
    cost = one.cost_per_hour(prices)
    return {
        "kind": one.kind,
        "roles": [
            {
                "role": role.role,
                "gpu": role.profile.gpu,
                "layout": str(role.profile.layout),
                "workers": role.workers,
                "batch": role.batch,
                "max_batched_tokens": role.max_batched_tokens,
                "source": role.profile.source,
            }
            for role in one.roles
        ],
        "warnings": one.warnings,
        "gpus": one.gpus,
        "requests_per_second": one.requests_per_second,
        "tokens_per_second": one.tokens_per_second,
        "tokens_per_second_per_gpu": one.per_gpu,
        "ttft_seconds": one.ttft_seconds,
        "itl_seconds": one.itl_seconds,
        "transfer_seconds": one.transfer_seconds,
        "prefill_utilization": one.utilization,
        "cost_per_hour": cost,
        "cost_per_million_tokens": None if cost is None else cost_per_million(one, cost),
    }


def draw_front(path: Path, report: PlanReport) -> None:
    """Raises OSError."""
    curves = [
        Curve(kind, [(one.per_user, one.per_gpu) for one in points])
        for kind, points in report.fronts.items()
        if points
    ]
    title = f"{report.model}: an estimate, {objective_text(report.given.objective)}"
    title = "\n".join([title, *(f"WARNING: {text}" for text in report.warnings)])
    panel = Panel("Front", "tokens/s of a stream", "tokens/s per GPU", curves)
    draw_curves(path, title, [panel])
