"""The condition Disaggregating and `status.disaggregation`, from the worker records. Pure. Ready
does not follow from it: without a prefill worker a decode worker prefills, which is only slower.
Figures are kept while they are about the same.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pdcluster_api.plan.observed.pools import PREFILL
from pdcluster_api.plan.observed.state import (
    Previous,
    WorkerDisaggregation,
    WorkerRecords,
    WorkloadState,
)
from pdcluster_api.plan.status.condition import Condition
from pdcluster_schema import conditions as words
from pdcluster_schema.text import and_more

FIELD = "disaggregation"
MAX_PAIRS = 8  # Refused pairs that the status names; the number of all is beside them

# Fewer long prompts than these that were all prefilled by decode workers say nothing: workers may
# just have met
FEW_PROMPTS = 5

_TYPE = words.DISAGGREGATING
_STEP_PERCENT = 5
_SAME = 0.25

Status = dict[str, Any]


@dataclass(frozen=True)
class DisaggregationReports:
    """Records of the workers of one revision, by pod.  num_prefill_ready: ready prefill workers."""

    decode: Mapping[str, WorkerDisaggregation]
    prefill: Mapping[str, WorkerDisaggregation]
    prefill_pods: frozenset[str]
    num_prefill_ready: int


@dataclass(frozen=True)
class DisaggregationResult:
    """condition: None = as of mixed workers; status: content of `status.disaggregation`"""

    condition: Condition | None = None
    status: Status = field(default_factory=dict)

    @property
    def fields(self) -> Status:
        return {FIELD: self.status} if self.status else {}


def reports_of(
    worker_records: WorkerRecords, workloads: Iterable[WorkloadState]
) -> DisaggregationReports:
    """Records of one revision's pods, without those of terminating pods."""
    by_role = [
        (state.id.role, pod)
        for state in workloads
        if not state.gone
        for pod in state.serving_pods
        if not pod.terminating
    ]
    pods = [pod for _, pod in by_role]
    prefill = {pod.name: pod.ready for role, pod in by_role if role == PREFILL}
    known = {
        pod.name: worker_records.disaggregation[pod.name]
        for pod in pods
        if pod.name in worker_records.disaggregation
    }
    return DisaggregationReports(
        decode={pod: each for pod, each in known.items() if pod not in prefill},
        prefill={pod: each for pod, each in known.items() if pod in prefill},
        prefill_pods=frozenset(prefill),
        num_prefill_ready=sum(prefill.values()),
    )


def disaggregating(
    reports: DisaggregationReports | None, previous: Previous, threshold: int
) -> DisaggregationResult:
    """The condition and its figures.

    reports:   None = etcd does not answer now, or was not asked yet: all stays as it was
    threshold: routing.offload.prefillLengthThreshold, in tokens
    """
    before = dict(previous.mapping(FIELD))
    if reports is None:
        return DisaggregationResult(Condition.kept(previous, _TYPE), before)
    status = _status(reports, before)
    return DisaggregationResult(_condition(reports, status, threshold), status)


def digest(reports: Mapping[str, WorkerDisaggregation]) -> object:
    """Rough key of condition and figures: while it stays the same no reconcile is needed."""
    refused = tuple((pod, each.refused, each.num_refused) for pod, each in sorted(reports.items()))
    num_long, num_remote = _counts(reports.values())
    share = None if not num_long else round(100 * num_remote / num_long / _STEP_PERCENT)
    transports = frozenset((each.transport, each.transport_note) for each in reports.values())
    rates = [each.bytes_per_second for each in reports.values() if each.bytes_per_second]
    is_shown = num_remote > 0 or num_long >= FEW_PROMPTS
    return refused, share, is_shown, transports, len(str(int(median(rates)))) if rates else 0


def readable_rate(bytes_per_second: float) -> str:
    """A rate as text.

    >>> readable_rate(1_200_000_000), readable_rate(850_000), readable_rate(40)
    ('1.2 GB/s', '850 kB/s', '40 B/s')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_second >= size:
            return f"{bytes_per_second / size:.3g} {unit}/s"
    return f"{bytes_per_second:.3g} B/s"


def _condition(reports: DisaggregationReports, status: Status, threshold: int) -> Condition:
    if pairs := status.get("refusedPairs"):
        first, more = pairs[0], and_more(status["numRefusedPairs"], " pairs")
        text = (
            f"decode worker {first['decode']} may not use prefill worker {first['prefill']}{more}, "
            f"and prefills by itself what it would send there: {first['reason']}"
        )
        return Condition.false(_TYPE, words.PAIR_REFUSED, text)
    num_long, num_remote = _counts(reports.decode.values())
    if num_long < FEW_PROMPTS and not num_remote:
        text = (
            f"too few prompts of {threshold} tokens or more "
            "(routing.offload.prefillLengthThreshold) to tell"
        )
        return Condition.unknown(_TYPE, words.NO_LONG_PROMPTS, text)
    if not reports.num_prefill_ready:
        text = "no prefill worker is ready, so decode workers prefill long prompts themselves"
        return Condition.false(_TYPE, words.NO_PREFILL_WORKER, text)
    if num_remote:
        rate, note = status.get("bytesPerSecond"), status.get("transportNote")
        at = f", where the last request's KV moved at about {readable_rate(rate)}" if rate else ""
        text = (
            f"about {status['remoteShare']} of long prompts are prefilled by prefill workers, over "
            f"{status['transport']}{at}" + (f" ({note})" if note else "")
        )
        return Condition.true(_TYPE, words.OFFLOADING, text)
    text = (
        "prefill workers are ready, and none of the last long prompts went there: see why remote "
        "prefills fail or find no credit in the decode workers' logs, whether ports 9000 and 9100 "
        "are open between them, and routing.offload.prefillQueueMax"
    )
    return Condition.false(_TYPE, words.NOT_OFFLOADING, text)


def _status(reports: DisaggregationReports, before: Status) -> Status:
    every = {**reports.prefill, **reports.decode}
    notes = [
        f"{pod}: {each.transport_note}"
        for pod, each in sorted(every.items())
        if each.transport_note
    ]
    found = {
        "transport": ",".join(sorted({each.transport for each in every.values()})) or None,
        "transportNote": notes[0] if notes else None,
        "remoteShare": _share(reports, before),
        "bytesPerSecond": _rate(reports, before),
        **_refused(reports),
    }
    return {name: value for name, value in found.items() if value is not None}


def _refused(reports: DisaggregationReports) -> Status:
    """Pairs of workers that are there, and the number of all: a record names only the first few."""
    pairs = [
        {"decode": decode, "prefill": prefill, "reason": reason}
        for decode, each in sorted(reports.decode.items())
        for prefill, reason in each.refused
        if prefill in reports.prefill_pods
    ]
    unnamed = sum(max(0, each.num_refused - len(each.refused)) for each in reports.decode.values())
    if not pairs:
        return {}
    return {"numRefusedPairs": len(pairs) + unnamed, "refusedPairs": pairs[:MAX_PAIRS]}


def _counts(reports: Iterable[WorkerDisaggregation]) -> tuple[int, float]:
    """(long prompts, those that a prefill worker computed)."""
    reported = [(each.long_prompts, each.remote_ratio or 0.0) for each in reports]
    return sum(number for number, _ in reported), sum(number * ratio for number, ratio in reported)


def _share(reports: DisaggregationReports, before: Status) -> str | None:
    """Remote prefills in steps, 0 and 100 only for none and all; kept while about that."""
    num_long, num_remote = _counts(reports.decode.values())
    if not num_long:
        return None
    percent = 100 * num_remote / num_long
    if num_remote in (0, num_long):
        return f"{percent:.0f}%"
    shown = re.fullmatch(r"([1-9][0-9]?)%", str(before.get("remoteShare")))
    if shown and abs(percent - int(shown[1])) < _STEP_PERCENT:
        return shown[0]
    steps = min(max(round(percent / _STEP_PERCENT), 1), 100 // _STEP_PERCENT - 1)
    return f"{steps * _STEP_PERCENT}%"


def _rate(reports: DisaggregationReports, before: Status) -> int | None:
    """The median over the prefill workers; kept while it is about that."""
    rates = [
        each.bytes_per_second for each in reports.prefill.values() if each.bytes_per_second > 0
    ]
    if not rates:
        return None
    found, was = int(median(rates)), before.get("bytesPerSecond")
    return was if isinstance(was, int) and abs(found - was) <= _SAME * was else found
