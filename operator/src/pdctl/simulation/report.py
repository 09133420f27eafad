"""Results of a simulation as lines, as JSON, and as a table over time."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, TextIO

from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_simulator.cluster import ClusterModel
from pdcluster_simulator.results import IntervalFigures, Latency, SimulationSummary
from pdcluster_simulator.run import PATIENCE_SECONDS, Result


@dataclass(frozen=True)
class SimulationReport:
    """not_simulated: what the file asks for and the simulator leaves out."""

    name: str
    summary: SimulationSummary
    moments: Sequence[IntervalFigures]
    result: Result
    sources: Sequence[str]
    not_simulated: Sequence[str]
    num_accelerators: int
    num_cells: int


def objectives_of(spec: PDClusterSpec) -> tuple[float, float | None]:
    """TTFT and time per output token in seconds; None = any."""
    slo = spec.qos.slo
    tpot = slo.tpot_milliseconds
    return slo.ttft_milliseconds / 1e3, None if tpot is None else tpot / 1e3


def left_out(model: ClusterModel, *, has_rollout: bool = False) -> list[str]:
    """Parts of the object that have an effect when it serves, and none here."""
    spec, policy = model.spec, model.policy
    engines = [spec.engine_of(role) for role in spec.roles.computing()]
    found = {
        "engine.speculation": any(engine.speculation is not None for engine in engines),
        "routing.decodeScore.queueThresholdTokens": (
            policy.decode_score.queue_threshold_tokens is not None
        ),
        "routing.racing": policy.racing.enabled,
        "qos.lowPriority.pastThreshold": (
            policy.low_priority.threshold_milliseconds is not None
            and policy.low_priority.past_threshold != "Shed"
        ),
        "qos.estimation.rejectUnmeetable": policy.estimation.reject_unmeetable,
        "qos.estimation.lateGroups": policy.estimation.late_groups != "Keep",
        "qos.tenants": bool(policy.tenants),
        "rollout.onFailure": has_rollout and spec.rollout.on_failure is not None,
    }
    return [name for name, is_given in found.items() if is_given]


def report_lines(report: SimulationReport) -> list[str]:
    found, cells = report.summary, report.num_cells
    size = f"{report.num_accelerators * cells} accelerators"
    size += f" in {cells} clusters" if cells > 1 else ""
    outcomes = ", ".join(f"{number} {name}" for name, number in sorted(found.outcomes.items()))
    lines = [
        f"{report.name}: simulated, {size}, {found.num_requests} requests in "
        f"{found.seconds:.0f} s ({outcomes})",
        f"goodput              {found.goodput:.3g} requests/s within the objectives, "
        f"{found.good_ratio:.1%} of all",
        f"throughput           {found.requests_per_second:.3g} requests/s, "
        f"{found.output_tokens_per_second:.0f} tokens/s out, "
        f"{found.prompt_tokens_per_second:.0f} in",
        f"time to first token  {_latency(found.ttft)}",
        f"between tokens       {_latency(found.itl)}",
        f"mean of a request    {_latency(found.tpot)}",
        f"remote prefills      {found.remote_ratio:.1%}",
    ]
    if number := found.outcomes.get("unfinished"):
        lines.append(
            f"unfinished           {number}: not ended {PATIENCE_SECONDS:.0f} s after the trace, "
            "and so not within the objectives"
        )
    if found.num_preemptions:
        lines.append(f"preemptions          {found.num_preemptions}")
    lines += [
        f"refused              {number}: {reason}" for reason, number in found.refusals.items()
    ]
    if hours := found.accelerator_hours:
        texts = [_hours_text(report, gpu, number) for gpu, number in hours.items()]
        lines.append("accelerator hours    " + ", ".join(texts))
    if cells > 1 and (report.result.decisions or report.result.rollout):
        lines.append(f"scaling, roll out    those of the first of {cells} clusters")
    lines += _scaling_lines(report)
    lines += _rollout_lines(report)
    lines += [f"step times           {source}" for source in report.sources]
    lines += [f"not simulated        {name}" for name in report.not_simulated]
    return lines


def _hours_text(report: SimulationReport, gpu: str, hours: float) -> str:
    samples = report.result.recorder.samples
    numbers = [sample.accelerators.get(gpu, 0) for sample in samples]
    most = max(numbers, default=0) * len(numbers)
    share = sum(numbers) / most if most else 1.0
    more = f" ({share:.0%} of the greatest number all the time)" if share < 1.0 else ""
    return f"{hours:.3g} {gpu}{more}"


def _scaling(report: SimulationReport) -> dict[str, Any]:
    """Figures of the autoscaler; none without one.  Ratios are shares of the time."""
    decisions, recorder = report.result.decisions, report.result.recorder
    if not decisions:
        return {}
    seconds = decisions[-1].seconds
    number = sum(each.record is not None for each in decisions)
    roles = sorted({role for role, _ in recorder.by_pool})
    reasons = sorted({reason for each in decisions for reason in each.problems})
    return {
        "changes": number,
        "changes_per_hour": 3600.0 * number / seconds,
        "over_ratio": {role: fmean(role in each.over for each in decisions) for role in roles},
        "problem_ratios": {
            reason: fmean(reason in each.problems for each in decisions) for reason in reasons
        },
        "repeated_ratio": recorder.repeated / seconds,
    }


def _scaling_lines(report: SimulationReport) -> list[str]:
    found = _scaling(report)
    if not found:
        return []
    over = ", ".join(f"{role} {ratio:.1%}" for role, ratio in found["over_ratio"].items())
    lines = [
        f"changes              {found['changes']}, {found['changes_per_hour']:.1f} per hour",
        f"time over threshold  {over}",
        *(
            f"stood in the way     {reason} for {ratio:.1%} of the time"
            for reason, ratio in found["problem_ratios"].items()
        ),
    ]
    if repeated := found["repeated_ratio"]:
        lines.append(f"repeated             {repeated:.0%} of the time, of a steady load")
    return lines


def _rollout_lines(report: SimulationReport) -> list[str]:
    found = report.result.rollout
    if found is None:
        return []
    took = "not ended" if found.seconds is None else f"{found.seconds:.0f} s"
    ready = ", ".join(f"{role} {number}" for role, number in found.least_ready.items())
    held = ", ".join(f"{number} {gpu}" for gpu, number in found.most_accelerators.items())
    share = found.out_of_band / max(1, found.intervals)
    return [
        f"roll out             {found.strategy} at {found.began:.0f} s: {took}, {held} at most",
        f"ready in it          at least {ready}; out of the ratio band {share:.1%} of the time",
    ]


def _latency(latency: Latency) -> str:
    values = (latency.mean, latency.p50, latency.p90, latency.p99)
    names = ("mean", "p50", "p90", "p99")
    texts = [
        f"{name} {'-' if value is None else f'{value:.3g} s'}"
        for name, value in zip(names, values, strict=True)
    ]
    return ", ".join(texts)


def report_json(report: SimulationReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "simulated": True,
        "accelerators": report.num_accelerators * report.num_cells,
        "summary": asdict(report.summary),
        "autoscaler": _scaling(report),
        "rollout": report.result.rollout and asdict(report.result.rollout),
        "over_time": [asdict(moment) for moment in report.moments],
        "samples": [asdict(sample) for sample in report.result.recorder.samples],
        "step_times": list(report.sources),
        "not_simulated": list(report.not_simulated),
    }


def write_moments(report: SimulationReport, file: TextIO) -> None:
    """A row for each interval."""
    samples = {sample.seconds: sample for sample in report.result.recorder.samples}
    roles = sorted({role for sample in samples.values() for role in sample.queued})
    pools = sorted({pool for sample in samples.values() for pool in sample.replicas})
    writer = csv.writer(file, lineterminator="\n")
    names = ("seconds", "arrived", "completed", "good", "ttft_p50", "ttft_p90", "tpot_p90")
    of_roles = [f"{role} {what}" for role in roles for what in ("queued", "kv_usage", "busy")]
    of_pools = [f"{pool} {what}" for pool in pools for what in ("replicas", "ready", "draining")]
    writer.writerow([*names, "running", *of_roles, *of_pools])
    for moment in report.moments:
        sample = samples.get(moment.seconds)
        row: list[float | int | None] = [getattr(moment, name) for name in names]
        if sample is not None:
            row.append(sample.running)
            for role in roles:
                row += [sample.queued.get(role), sample.kv_usage.get(role), sample.busy.get(role)]
            for pool in pools:
                row += [
                    sample.replicas.get(pool),
                    sample.ready.get(pool),
                    sample.draining.get(pool),
                ]
        writer.writerow(["" if value is None else f"{value:.6g}" for value in row])
