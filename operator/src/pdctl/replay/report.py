"""Results of a replay: figures of the whole, and a CSV file with a row for each interval."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


_PLAIN = (
    "seconds",
    "requests_per_second",
    "input_tokens",
    "output_tokens",
    "prefill_demand_workers",
    "decode_demand_workers",
    "prefill_queue_requests",
    "prefill_busy_ratio",
    "num_requests_waiting",
    "kv_cache_usage_ratio",
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
)


def write_table(moments: Sequence[Moment], file: TextIO) -> None:
    pools = list(moments[0].pools)
    writer = csv.writer(file, lineterminator="\n")
    of_pools = [
        f"{role}/{pool} {name}"
        for role, pool in pools
        for name in ("replicas", "ready", "draining")
    ]
    writer.writerow([*_PLAIN, *of_pools, "decision", "problems"])
    writer.writerows(_rows(moments))


def _rows(moments: Sequence[Moment]) -> Iterator[list[str]]:
    for moment in moments:
        load = moment.load
        numbers = (
            load.seconds,
            load.requests_per_second,
            load.input_tokens,
            load.output_tokens,
            moment.demand["prefill"],
            moment.demand["decode"],
            moment.prefill_queue_requests,
            moment.engine_busy_ratio,
            moment.num_requests_waiting,
            moment.kv_cache_usage_ratio,
            moment.ttft_seconds,
            moment.tpot_seconds,
        )
        sizes = [
            str(number)
            for pool in moment.pools.values()
            for number in (pool.replicas, pool.ready, pool.draining)
        ]
        decision = "" if moment.record is None else summary(moment.record)
        yield [
            *("" if number is None else f"{number:.6g}" for number in numbers),
            *sizes,
            decision,
            " ".join(moment.problems),
        ]
