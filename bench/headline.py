"""The figures to reach: each a ratio of one run, or a number of our own, beside its limit.

A row says what was measured, never more: without a figure it says "-".
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from footprint import Footprint
from layout import cell, table
from results import Results
from stats import STREAM_RATE, spread

OURS = ("mixed", "1p1d")


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio of ours to theirs.

    limit:    None = published only
    is_most:  the limit is the most that it may be, not the least
    """

    workload: str
    metric: str
    ours: str
    theirs: str
    limit: float | None = None
    is_most: bool = False


GOODPUT = "goodput good/s"
GOALS: Sequence[Goal] = (
    Goal("A", "output tokens/s", "mixed", "vllm", 1.25),
    Goal("A", "TTFT mean ms", "mixed", "vllm", 0.8, is_most=True),
    Goal("sampled", "output tokens/s", "mixed", "vllm"),
    Goal("client", "output tokens/s", "mixed", "vllm"),
    Goal("client", "TTFT mean ms", "mixed", "vllm"),
    Goal("single", STREAM_RATE, "mixed", "vllm", 1.25),
    Goal("B-0.5", GOODPUT, "mixed", "vllm"),
    Goal("B-1.0", GOODPUT, "mixed", "vllm", 1.2),
    Goal("B-1.5", GOODPUT, "mixed", "vllm", 1.2),
    Goal("B-2.0", GOODPUT, "mixed", "vllm"),
    Goal("offline", "output tokens/s", "mixed", "vllm"),
    Goal("mix", GOODPUT, "mixed", "vllm"),
    Goal("mix", "TTFT mean ms", "mixed", "vllm"),
    Goal("chat", "output tokens/s", "mixed", "vllm"),
    Goal("chat", "TTFT mean ms", "mixed", "vllm"),
    Goal("A", "output tokens/s", "mixed", "hf"),
    Goal("A", "output tokens/s", "variant", "mixed"),
    Goal("single", STREAM_RATE, "variant", "mixed"),
    *(
        Goal(f"B-{rate}", metric, "1p1d", "mixed")
        for rate in ("0.5", "1.0", "1.5", "2.0")
        for metric in (GOODPUT, "TPOT p99 ms")
    ),
)


@dataclass(frozen=True, slots=True)
class OwnGoal:
    """A number of our systems.  most: its limit"""

    text: str
    most: float
    values: Callable[[Results, str], list[float]]


def _starts(results: Results, system: str) -> list[float]:
    return results.start_seconds.get(system, [])


def _idle(results: Results, system: str) -> list[float]:
    return (
        [sum(one.cpu_percent for one in results.footprints.get(system, []))]
        if system in results.footprints
        else []
    )


def _memory(results: Results, system: str) -> list[float]:
    return [_without_kv(one) for one in results.footprints.get(system, [])]


def _without_kv(one: Footprint) -> float:
    return (one.server_bytes[0] + one.engine_bytes[0] - one.kv_bytes) / 1e9


def _overhead(results: Results, system: str) -> list[float]:
    return [
        engine.overhead_ms_per_step
        for one in results.rounds("offline", system)
        for engine in one.engines.values()
    ]


OWN_GOALS: Sequence[OwnGoal] = (
    OwnGoal("start to ready, s", 6.0, _starts),
    OwnGoal("idle, % of a core", 1.0, _idle),
    OwnGoal("resident less reserved KV, GB a worker", 0.9, _memory),
    OwnGoal("offline: ms a step outside the model", 1.0, _overhead),
)


def headline(results: Results) -> str:
    """The table; empty where the run has nothing to say to any goal."""
    rows = [*_ratio_rows(results), *_own_rows(results)]
    title = (
        "### Figures to reach\n\nRatios of each round, their median [least - greatest]; the median "
        "decides."
    )
    return f"{title}\n\n{table(['', 'measured', 'to reach', 'reached'], rows)}" if rows else ""


def _ratio_rows(results: Results) -> Iterator[list[str]]:
    for goal in GOALS:
        if values := results.ratios(goal.workload, goal.metric, goal.ours, goal.theirs):
            name = f"{goal.workload}: {goal.metric}, {goal.ours} / {goal.theirs}"
            yield [name, cell(values), *_verdict(values, goal.limit, is_most=goal.is_most)]


def _own_rows(results: Results) -> Iterator[list[str]]:
    for goal in OWN_GOALS:
        for system in OURS:
            if values := goal.values(results, system):
                yield [
                    f"{system}: {goal.text}",
                    cell(values),
                    *_verdict(values, goal.most, is_most=True),
                ]


def _verdict(values: Sequence[float], limit: float | None, *, is_most: bool) -> list[str]:
    if limit is None:
        return ["-", "-"]
    middle = spread(values).median
    is_reached = middle <= limit if is_most else middle >= limit
    return [f"{'<=' if is_most else '>='} {limit:g}", "yes" if is_reached else "no"]
