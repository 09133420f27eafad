"""Results of a replay: figures of the whole, and a CSV file with a row for each interval."""

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TextIO

from pdcluster_api.plan.autoscale.explain import summary
from pdcluster_schema.workload import PoolKey
from pdctl.replay.run import Moment

ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class Summary:
    """Figures over all intervals.

    accelerator_hours: by type, including starting and draining workers
    fixed_hours:       of each pool at its greatest size all the time, by type
    over_ratio:        by role, share of time with a signal over its threshold
    num_changes:       decisions that changed replicas
    unserved:          requests that wait at the end
    """

    hours: float
    accelerator_hours: dict[str, float]
    fixed_hours: dict[str, float]
    over_ratio: dict[str, float]
    num_changes: int
    num_requests: float
    unserved: float
    worst_ttft_seconds: float | None
    worst_tpot_seconds: float | None
    num_cut: float
    problem_ratios: dict[str, float]

    @property
    def changes_per_hour(self) -> float:
        return self.num_changes / self.hours


def summarize(moments: Sequence[Moment], interval_seconds: float) -> Summary:
    step_hours = interval_seconds / 3600.0
    used, most = Counter[str](), dict[PoolKey, tuple[str, int]]()
    for moment in moments:
        for key, pool in moment.pools.items():
            used[pool.gpu] += pool.accelerators
            most[key] = (pool.gpu, max(most.get(key, ("", 0))[1], pool.accelerators))
    fixed = Counter[str]()
    for gpu, number in most.values():
        fixed[gpu] += number
    problems = Counter(reason for moment in moments for reason in moment.problems)
    return Summary(
        hours=len(moments) * step_hours,
        accelerator_hours={gpu: number * step_hours for gpu, number in used.items()},
        fixed_hours={gpu: number * len(moments) * step_hours for gpu, number in fixed.items()},
        over_ratio={
            role: sum(role in moment.over for moment in moments) / len(moments) for role in ROLES
        },
        num_changes=sum(moment.record is not None for moment in moments),
        num_requests=sum(moment.load.requests_per_second for moment in moments) * interval_seconds,
        unserved=moments[-1].prefill_queue_requests + moments[-1].num_requests_waiting,
        worst_ttft_seconds=max(
            (moment.ttft_seconds for moment in moments if moment.ttft_seconds is not None),
            default=None,
        ),
        worst_tpot_seconds=max(
            (moment.tpot_seconds for moment in moments if moment.tpot_seconds is not None),
            default=None,
        ),
        num_cut=sum(moment.num_cut for moment in moments),
        problem_ratios={
            reason: number / len(moments) for reason, number in sorted(problems.items())
        },
    )


def summary_lines(summary: Summary) -> list[str]:
    lines = [
        f"{summary.hours:.1f} hours, {summary.num_requests:.0f} requests",
        "accelerator hours    "
        + ", ".join(
            f"{hours:.1f} {gpu} ({_share(hours, summary.fixed_hours[gpu])} of the greatest size "
            "kept all the time)"
            for gpu, hours in summary.accelerator_hours.items()
        ),
        "time over threshold  "
        + ", ".join(f"{role} {ratio:.1%}" for role, ratio in summary.over_ratio.items()),
        f"changes              {summary.num_changes}, {summary.changes_per_hour:.1f} per hour",
        f"worst latencies      TTFT {_seconds(summary.worst_ttft_seconds)}, TPOT "
        f"{_seconds(summary.worst_tpot_seconds)}"
        " (means of an interval)",
    ]
    if summary.unserved >= 1.0:
        lines.append(
            f"left at the end      {summary.unserved:.0f} requests wait: the trace ends under load"
        )
    if summary.num_cut > 0.0:
        lines.append(
            f"cut by the limit     {summary.num_cut:.1f} streams (rollout.drainTimeoutSeconds)"
        )
    lines += [
        f"stood in the way     {reason} for {ratio:.1%} of the time"
        for reason, ratio in summary.problem_ratios.items()
    ]
    return lines


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "100%"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


_PLAIN: dict[str, Callable[[Moment], float | None]] = {
    "seconds": lambda moment: moment.load.seconds,
    "requests_per_second": lambda moment: moment.load.requests_per_second,
    "input_tokens": lambda moment: moment.load.input_tokens,
    "output_tokens": lambda moment: moment.load.output_tokens,
    "prefill_demand_workers": lambda moment: moment.demand["prefill"],
    "decode_demand_workers": lambda moment: moment.demand["decode"],
    "prefill_queue_requests": lambda moment: moment.prefill_queue_requests,
    "prefill_busy_ratio": lambda moment: moment.engine_busy_ratio,
    "num_requests_waiting": lambda moment: moment.num_requests_waiting,
    "kv_cache_usage_ratio": lambda moment: moment.kv_cache_usage_ratio,
    "time_to_first_token_seconds": lambda moment: moment.ttft_seconds,
    "time_per_output_token_seconds": lambda moment: moment.tpot_seconds,
}
_OF_POOLS = ("replicas", "ready", "draining")


def columns(moments: Sequence[Moment]) -> dict[str, list[float | None]]:
    """The table's numbers by name."""
    found: dict[str, list[float | None]] = {
        name: [value(moment) for moment in moments] for name, value in _PLAIN.items()
    }
    for (role, pool), name in product(moments[0].pools, _OF_POOLS):
        sizes = [getattr(moment.pools[role, pool], name) for moment in moments]
        found[f"{role}/{pool} {name}"] = sizes
    return found


def write_table(moments: Sequence[Moment], file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    of_pools = [f"{role}/{pool} {name}" for role, pool in moments[0].pools for name in _OF_POOLS]
    writer.writerow([*_PLAIN, *of_pools, "decision", "problems"])
    writer.writerows(_row(moment) for moment in moments)


def _row(moment: Moment) -> list[str]:
    numbers = [value(moment) for value in _PLAIN.values()]
    sizes = [getattr(pool, name) for pool in moment.pools.values() for name in _OF_POOLS]
    return [
        *("" if number is None else f"{number:.6g}" for number in numbers),
        *map(str, sizes),
        "" if moment.record is None else summary(moment.record),
        " ".join(moment.problems),
    ]
