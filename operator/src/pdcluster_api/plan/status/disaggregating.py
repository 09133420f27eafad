"""The condition Disaggregating and `status.disaggregation`, from the worker records. Pure. Ready
does not follow from it: without a prefill worker a decode worker prefills, which is only slower.
Figures are kept while they are about the same.
"""

from collections.abc import Iterable, Mapping, Sequence
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

FIELD = "disaggregation"
MAX_PAIRS = 8  # Refused pairs that the status names; the number of all is beside them

# Fewer long prompts than these that were all prefilled by decode workers say nothing: workers may
# just have met
FEW_PROMPTS = 5

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


@dataclass(frozen=True)
class _Pair:
    decode: str
    prefill: str
    reason: str


def reports_of(
    worker_records: WorkerRecords, workloads: Iterable[WorkloadState]
) -> DisaggregationReports:
    """Records of one revision's pods, without those of terminating pods."""
    pods = [
        pod for state in workloads if not state.gone for pod in state.pods if not pod.terminating
    ]
    prefill = [pod for pod in pods if pod.workload.role == PREFILL]
    reports = worker_records.disaggregation
    return DisaggregationReports(
        decode={
            pod.name: reports[pod.name]
            for pod in pods
            if pod.workload.role != PREFILL and pod.name in reports
        },
        prefill={pod.name: reports[pod.name] for pod in prefill if pod.name in reports},
        prefill_pods=frozenset(pod.name for pod in prefill),
        num_prefill_ready=sum(pod.ready for pod in prefill),
    )


def disaggregating(
    reports: DisaggregationReports | None, previous: Previous, threshold: int
) -> DisaggregationResult:
    """The condition and its figures.

    reports:   None = etcd does not answer now, or was not asked yet: all stays as it was
    threshold: routing.offload.prefillLengthThreshold, in tokens
    """
    before = _before(previous)
    if reports is None:
        return DisaggregationResult(Condition.kept(previous, words.DISAGGREGATING), before)
    pairs, num_refused = _refused(reports)
    share = _share(reports, before)
    status = _status(reports, pairs, num_refused, share, before)
    return DisaggregationResult(_condition(reports, pairs, num_refused, status, threshold), status)


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


def _condition(
    reports: DisaggregationReports,
    pairs: Sequence[_Pair],
    num_refused: int,
    status: Status,
    threshold: int,
) -> Condition:
    kind = words.DISAGGREGATING
    if pairs:
        return Condition.false(kind, words.PAIR_REFUSED, _of_pairs(pairs, num_refused))
    num_long, num_remote = _counts(reports.decode.values())
    if num_remote:
        return Condition.true(kind, words.OFFLOADING, _of_share(status))
    if num_long < FEW_PROMPTS:
        text = (
            f"too few prompts of {threshold} tokens or more "
            "(routing.offload.prefillLengthThreshold) to tell"
        )
        return Condition.unknown(kind, words.NO_LONG_PROMPTS, text)
    if not reports.num_prefill_ready:
        text = (
            "no prefill worker is ready, so decode workers prefill long prompts themselves: see "
            "PrefillReady"
        )
        return Condition.false(kind, words.NO_PREFILL_WORKER, text)
    text = (
        "prefill workers are ready, and none of the last long prompts went there: see why remote "
        "prefills fail or find no credit "
        "in the decode workers' logs, whether ports 9000 and 9100 are open between them, and "
        "routing.offload.prefillQueueMax"
    )
    return Condition.false(kind, words.NOT_OFFLOADING, text)


def _of_pairs(pairs: Sequence[_Pair], num_refused: int) -> str:
    first = pairs[0]
    others = f" (and {num_refused - 1} more pairs)" if num_refused > 1 else ""
    return (
        f"decode worker {first.decode} may not use prefill worker {first.prefill}{others}, "
        f"and prefills by itself what it would send there: {first.reason}"
    )


def _of_share(status: Status) -> str:
    rate = status.get("bytesPerSecond")
    at = f", where the last request's KV moved at about {readable_rate(rate)}" if rate else ""
    note = status.get("transportNote")
    return (
        f"about {status['remoteShare']} of long prompts are prefilled by prefill workers, over "
        f"{status['transport']}{at}" + (f" ({note})" if note else "")
    )


def _refused(reports: DisaggregationReports) -> tuple[list[_Pair], int]:
    """Pairs of workers that are there, and the number of all: a record names only the first few."""
    pairs = [
        _Pair(decode, prefill, reason)
        for decode, each in sorted(reports.decode.items())
        for prefill, reason in each.refused
        if prefill in reports.prefill_pods
    ]
    unnamed = sum(max(0, each.num_refused - len(each.refused)) for each in reports.decode.values())
    return pairs, len(pairs) + (unnamed if pairs else 0)


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
    was = _percent(before.get("remoteShare"))
    if was is not None and 0 < was < 100 and abs(percent - was) < _STEP_PERCENT:
        return f"{was}%"
    steps = min(max(round(percent / _STEP_PERCENT), 1), 100 // _STEP_PERCENT - 1)
    return f"{steps * _STEP_PERCENT}%"


def _status(
    reports: DisaggregationReports,
    pairs: Sequence[_Pair],
    num_refused: int,
    share: str | None,
    before: Status,
) -> Status:
    transports = sorted(
        {each.transport for each in (*reports.decode.values(), *reports.prefill.values())}
    )
    notes = [
        f"{pod}: {each.transport_note}"
        for pod, each in sorted({**reports.prefill, **reports.decode}.items())
        if each.transport_note
    ]
    rate = _rate(reports, before)
    named = [
        {"decode": pair.decode, "prefill": pair.prefill, "reason": pair.reason}
        for pair in pairs[:MAX_PAIRS]
    ]
    return {
        **({"transport": ",".join(transports)} if transports else {}),
        **({"transportNote": notes[0]} if notes else {}),
        **({} if share is None else {"remoteShare": share}),
        **({} if rate is None else {"bytesPerSecond": rate}),
        **({"numRefusedPairs": num_refused, "refusedPairs": named} if named else {}),
    }


def _rate(reports: DisaggregationReports, before: Status) -> int | None:
    """The median over the prefill workers; kept while it is about that."""
    rates = [
        each.bytes_per_second for each in reports.prefill.values() if each.bytes_per_second > 0
    ]
    if not rates:
        return None
    found, was = int(median(rates)), before.get("bytesPerSecond")
    return was if isinstance(was, int) and abs(found - was) <= _SAME * was else found


def _percent(text: object) -> int | None:
    digits = text.removesuffix("%") if isinstance(text, str) else ""
    return (
        int(digits)
        if digits.isascii() and digits.isdecimal() and len(digits) <= len("100")
        else None
    )


def _before(previous: Previous) -> Status:
    found = previous.mapping(FIELD)
    return dict(found)
