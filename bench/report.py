"""Turns measurements into the text that `make bench-peers` prints and bench/results keeps.

Every figure is the median over the rounds with [least - greatest]; a ratio is
taken inside each round first.  It states formulas, conditions and the health of
the load generator beside the figures.  It measures nothing.
"""

from collections.abc import Callable

from footprint import Footprint
from headline import headline
from layout import cell, table
from results import Results
from setting import setting_lines
from stats import LATENCIES, RATES, SLO, STREAM_RATE, EngineCounters, chunks_per_token, start_delays
from workload import Workload

from pdctl.bench.load import percentile

_RATIOS = (
    ("mixed", "vllm"),
    ("1p1d", "vllm"),
    ("1p1d", "mixed"),
    ("mixed", "hf"),
    ("variant", "mixed"),
)

DEFINITIONS = f"""\
Measured by the client, on one monotonic clock, over complete answers; a failed answer counts in
`sent` and is never good.

- TTFT: scheduled arrival to first chunk (closed loop: a request is due when its client is free),
  so waiting for a free system is in it.
- TPOT: per request, (e2e - TTFT) / (output tokens - 1), e2e to the last chunk.
- {STREAM_RATE}: 1 / (median TPOT over answers).
- ITL: every gap between two chunks of an answer, over all answers.
- Goodput: answers with TTFT <= {SLO.ttft_seconds:g} s and TPOT <= {SLO.tpot_seconds:g} s, per
  second of the run; and their share of sent.
- Percentiles: linear interpolation between closest ranks, over one round's requests (with few
  requests p99 is close to the worst).
- Cells: median over rounds [least - greatest]. Ratios are taken in each round first; over 1 is
  better for rates, worse for times."""


def render(results: Results, seed: str) -> str:
    """The whole report, in Markdown."""
    parts = [_setting(results, seed), DEFINITIONS, headline(results), _troubles(results)]
    parts += [_workload(results, workload) for workload in results.workloads]
    return "\n\n".join(filter(None, [*parts, _engines(results), _idle(results)]))


def _troubles(results: Results) -> str:
    """List what failed as a whole; the other figures stand."""
    return (
        "\n".join(["### Not measured", "", *(f"- {trouble}" for trouble in results.troubles)])
        if results.troubles
        else ""
    )


def _setting(results: Results, seed: str) -> str:
    return "\n".join(
        [
            *setting_lines("bench/run.py", f"seed {seed}, ", results.load_average),
            *(
                f"- {line}; start to ready {cell(results.start_seconds[name])} s"
                for name in results.systems
                for line in results.conditions.get(name, ())
            ),
        ]
    )


def _workload(results: Results, workload: Workload) -> str:
    systems = [name for name in results.systems if results.rounds(workload.name, name)]
    pairs = [(ours, theirs) for ours, theirs in _RATIOS if ours in systems and theirs in systems]
    rows = []
    for metric in (*LATENCIES, *RATES):
        figures = [list(results.figures(workload.name, name, metric).values()) for name in systems]
        among = [results.ratios(workload.name, metric, *pair) for pair in pairs]
        rows.append([metric, *(cell(values) for values in (*figures, *among))])
    title = f"### {workload.name}: {workload.describe()}"
    header = ["", *systems, *(f"{ours} / {theirs}" for ours, theirs in pairs)]
    return "\n\n".join([title, table(header, rows), _health(results, workload)])


def _health(results: Results, workload: Workload) -> str:
    """List what was sent and what failed, and whether the load generator kept up."""
    lines = []
    for name in results.systems:
        measured = results.rounds(workload.name, name)
        if not measured:
            continue
        runs = [one.run for one in measured]
        failures = [failure for run in runs for failure in run.failures]
        delays = [delay for run in runs for delay in start_delays(run)]
        remote = sum(
            engine.num_remote_prefills for one in measured for engine in one.engines.values()
        )
        others = [100 * one.others_cpu_seconds / one.run.duration_seconds for one in measured]
        lines.append(
            f"- {name}: sent {sum(len(run.results) for run in runs)}, failed {len(failures)}, "
            f"prefilled remotely {remote:.0f}; "
            f"generator: start delay p99 {1e3 * percentile(delays, 99):.1f} ms, worst "
            f"{1e3 * max(delays):.1f} ms, "
            f"CPU {cell([100 * run.client_cpu_seconds / run.duration_seconds for run in runs])} % "
            "of a core, "
            f"chunks per token {cell([chunks_per_token(run) for run in runs])}; "
            f"other processes {cell(others)} % of a core"
        )
        lines += [f"  - failed: {failure}" for failure in sorted(set(failures))]
    return "\n".join(lines)


def _engines(results: Results) -> str:
    """The engine's own overhead: what a step costs outside the model."""
    rows = []
    for workload, system in results.measurements:
        measured = results.rounds(workload, system)
        for worker in measured[0].engines if measured else ():
            pairs = [(one.engines[worker], one.run.duration_seconds) for one in measured]
            columns: list[Callable[[EngineCounters, float], float]] = [
                lambda engine, _: engine.num_steps,
                lambda engine, _: engine.overhead_ms_per_step,
                lambda engine, _: (
                    100 * engine.overhead_seconds / engine.step_seconds
                    if engine.step_seconds
                    else 0.0
                ),
                lambda engine, seconds: 100 * engine.step_seconds / seconds,
            ]
            rows.append(
                [
                    workload,
                    system,
                    worker,
                    *(
                        cell([column(engine, seconds) for engine, seconds in pairs])
                        for column in columns
                    ),
                ]
            )
    header = [
        "workload",
        "system",
        "worker",
        "steps",
        "ms a step outside the model",
        "% of step time",
        "engine busy %",
    ]
    return "### Engine overhead\n\n" + table(header, rows) if rows else ""


def _idle(results: Results) -> str:
    """Idle workers after load; limits of ours: 1 % of a core, 0.9 GB apart from KV."""
    measured = {name: footprints for name, footprints in results.footprints.items() if footprints}
    if not measured:
        return ""
    rows = [[name, *_footprint(one)] for name, footprints in measured.items() for one in footprints]
    totals = (
        f"{name} {sum(one.cpu_percent for one in footprints):.2f} %"
        for name, footprints in measured.items()
    )
    header = [
        "system",
        "worker",
        "CPU % of a core",
        "server RSS (USS) MB",
        "engine RSS (USS) MB",
        "both RSS MB",
        "KV reserved MB",
        "both - KV MB",
    ]
    note = (
        f"CPU of all workers of a system: {', '.join(totals)}. RSS holds only the KV blocks that "
        "load has touched, so what "
        "a worker needs apart from KV lies between the last column and the column `both RSS`."
    )
    return "\n\n".join(["### Idle, after load", table(header, rows), note])


def _footprint(one: Footprint) -> list[str]:
    both = one.server_bytes[0] + one.engine_bytes[0]
    sizes = [
        f"{resident / 1e6:.0f} ({unique / 1e6:.0f})"
        for resident, unique in (one.server_bytes, one.engine_bytes)
    ]
    return [
        one.worker,
        f"{one.cpu_percent:.2f}",
        *sizes,
        *(f"{size / 1e6:.0f}" for size in (both, one.kv_bytes, both - one.kv_bytes)),
    ]
