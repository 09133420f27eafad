"""Turns measurements into the text that `make bench` prints and docs/bench/LOG.md keeps.

Every figure is the median over the rounds with [least - greatest]; a ratio is
taken inside each round first.  It states formulas, conditions and the health of
the load generator beside the figures.  It measures nothing.
"""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
from cluster import Footprint
from stats import (
    LATENCIES,
    RATES,
    TPOT_SLO_SECONDS,
    TTFT_SLO_SECONDS,
    EngineCounters,
    Run,
    chunks_per_token,
    percentile,
    ratios,
    spread,
    start_delays,
    summarize,
)
from workload import Workload

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("torch", "transformers", "httpx")
_RATIOS = (("mixed", "hf"), ("1p1d", "hf"), ("1p1d", "mixed"))

DEFINITIONS = f"""\
Measured by the client, on one monotonic clock, over complete answers; a failed answer counts in `sent` and is never good.
- TTFT: scheduled arrival to first chunk (closed loop: a request is due when its client is free), so waiting for a free system is in it.
- TPOT: per request, (e2e - TTFT) / (output tokens - 1), e2e to the last chunk.
- ITL: every gap between two chunks of an answer, over all answers.
- Goodput: answers with TTFT <= {TTFT_SLO_SECONDS:g} s and TPOT <= {TPOT_SLO_SECONDS:g} s, per second of the run; and their share of sent.
- Percentiles: linear interpolation between closest ranks, over one round's requests (with few requests p99 is close to the worst).
- Cells: median over rounds [least - greatest]. Ratios are taken in each round first; over 1 is better for rates, worse for times."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One workload on one system in one round.  engines: what each worker's engine counted meanwhile."""

    run: Run
    engines: Mapping[str, EngineCounters]


@dataclass(frozen=True, slots=True)
class Results:
    """Everything of one bench.  The bench fills the collections as it goes, the report reads them.

    measurements: by (workload, system), a round each, in order.
    conditions, start_seconds, footprints: by system, the last of the first round.
    """

    workloads: Sequence[Workload]
    systems: Sequence[str]
    load_average: float
    measurements: defaultdict[tuple[str, str], list[Measurement]] = field(default_factory=lambda: defaultdict(list))
    conditions: dict[str, list[str]] = field(default_factory=dict)
    start_seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    footprints: dict[str, list[Footprint]] = field(default_factory=dict)


def render(results: Results, seed: str) -> str:
    """The whole report, in Markdown."""
    parts = [_setting(results, seed), DEFINITIONS, *(_workload(results, workload) for workload in results.workloads)]
    return "\n\n".join([*parts, *filter(None, [_engines(results), _idle(results)])])


def log_entry(report: str) -> str:
    """An entry for docs/bench/LOG.md; a person writes what it says."""
    return f"\n## {datetime.now(UTC):%Y-%m-%d}, commit {_commit()}\n\n**What it says:**\n\n{report}\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with its columns aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([texts[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *texts[1:]])


def cell(values: Sequence[float]) -> str:
    """The median and, over several rounds, the spread; "-" without a value."""
    if not values:
        return "-"
    figure = spread(values)
    middle, low, high = (_number(value) for value in (figure.median, figure.low, figure.high))
    return middle if len(values) == 1 else f"{middle} [{low} - {high}]"


def _number(value: float) -> str:
    """Three significant digits, and never an exponent for what is large."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def setting_lines(program: str, more: str, load_average: float) -> list[str]:
    """Command, commit, machine and versions of a run.  more: what else is said of the command, with a comma at its end."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    command = shlex.join([program, *sys.argv[1:]])
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    return [
        f"- Command: `{command}`, {more}commit {_commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"- Machine: {_cpu_model()}, {cores} cores, {memory:.0f} GiB; load average before the run {load_average:.2f}",
        f"- Python {platform.python_version()}, {versions}",
    ]


def _setting(results: Results, seed: str) -> str:
    return "\n".join(
        [
            *setting_lines("bench/run.py", f"seed {seed}, ", results.load_average),
            *(
                f"- {line}; start to ready {cell(results.start_seconds[name])} s"
                for name in results.systems
                for line in results.conditions[name]
            ),
        ]
    )


def _workload(results: Results, workload: Workload) -> str:
    rounds = {name: [summarize(one.run) for one in results.measurements[workload.name, name]] for name in results.systems}
    pairs = [(ours, theirs) for ours, theirs in _RATIOS if ours in rounds and theirs in rounds]
    rows = []
    for metric in (*LATENCIES, *RATES):
        series = {name: [summary[metric] for summary in summaries if metric in summary] for name, summaries in rounds.items()}
        rows.append([metric, *(cell(series[name]) for name in results.systems), *(_ratio(series[a], series[b]) for a, b in pairs)])
    title = f"### {workload.name}: {workload.describe()}"
    header = ["", *results.systems, *(f"{ours} / {theirs}" for ours, theirs in pairs)]
    return "\n\n".join([title, table(header, rows), _health(results, workload)])


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return cell(ratios(ours, theirs)) if len(ours) == len(theirs) else "-"


def _health(results: Results, workload: Workload) -> str:
    """What was sent and what failed, and whether the load generator kept up."""
    lines = []
    for name in results.systems:
        measured = results.measurements[workload.name, name]
        runs = [one.run for one in measured]
        failures = [failure for run in runs for failure in run.failures]
        delays = [delay for run in runs for delay in start_delays(run)]
        remote = sum(engine.num_remote_prefills for one in measured for engine in one.engines.values())
        lines.append(
            f"- {name}: sent {sum(len(run.answers) for run in runs)}, failed {len(failures)}, prefilled remotely {remote:.0f}; "
            f"generator: start delay p99 {1e3 * percentile(delays, 99):.1f} ms, worst {1e3 * max(delays):.1f} ms, "
            f"CPU {cell([100 * run.client_cpu_seconds / run.duration_seconds for run in runs])} % of a core, "
            f"chunks per token {cell([chunks_per_token(run) for run in runs])}"
        )
        lines += [f"  - failed: {failure}" for failure in sorted(set(failures))]
    return "\n".join(lines)


def _engines(results: Results) -> str:
    """The engine's own overhead: what a step costs outside the model."""
    rows = []
    for (workload, _), measured in results.measurements.items():
        for worker in measured[0].engines:
            pairs = [(one.engines[worker], one.run.duration_seconds) for one in measured]
            columns: list[Callable[[EngineCounters, float], float]] = [
                lambda engine, _: engine.num_steps,
                lambda engine, _: engine.overhead_ms_per_step,
                lambda engine, _: 100 * engine.overhead_seconds / engine.step_seconds if engine.step_seconds else 0.0,
                lambda engine, seconds: 100 * engine.step_seconds / seconds,
            ]
            rows.append([workload, worker, *(cell([column(engine, seconds) for engine, seconds in pairs]) for column in columns)])
    header = ["workload", "worker", "steps", "ms a step outside the model", "% of step time", "engine busy %"]
    return "### Engine overhead\n\n" + table(header, rows) if rows else ""


def _idle(results: Results) -> str:
    """Idle workers after load; limits: 2 % of a core, 1.5 GB apart from KV."""
    measured = {name: footprints for name, footprints in results.footprints.items() if footprints}
    if not measured:
        return ""
    rows = [_footprint(one) for footprints in measured.values() for one in footprints]
    totals = (f"{name} {sum(one.cpu_percent for one in footprints):.2f} %" for name, footprints in measured.items())
    header = ["worker", "CPU % of a core", "server RSS (USS) MB", "engine RSS (USS) MB", "both RSS MB", "KV reserved MB", "both - KV MB"]
    note = (
        f"CPU of all workers of a system: {', '.join(totals)}. RSS holds only the KV blocks that load has touched, so what "
        "a worker needs apart from KV lies between the last column and the column `both RSS`."
    )
    return "\n\n".join(["### Idle, after load", table(header, rows), note])


def _footprint(one: Footprint) -> list[str]:
    both = one.server_bytes[0] + one.engine_bytes[0]
    sizes = [f"{resident / 1e6:.0f} ({unique / 1e6:.0f})" for resident, unique in (one.server_bytes, one.engine_bytes)]
    return [one.worker, f"{one.cpu_percent:.2f}", *sizes, *(f"{size / 1e6:.0f}" for size in (both, one.kv_bytes, both - one.kv_bytes))]


def _commit() -> str:
    try:
        commit, changes = (_git(*command) for command in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain")))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with local changes" if changes else commit


def _git(*command: str) -> str:
    return subprocess.run(("git", "-C", _ROOT, *command), capture_output=True, text=True, check=True).stdout.strip()


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"
