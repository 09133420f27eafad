"""KVTransferVerified, `status.transfers`, and the pairs of pools to verify now. Pure; the status is
the memory. Ready does not follow: a failed transfer costs a local prefill.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pdcluster_api.plan.observed.pools import PREFILL
from pdcluster_api.plan.observed.state import PairVerification, Previous, Problem, WorkloadState
from pdcluster_api.plan.result import DueVerification
from pdcluster_api.plan.status.condition import Condition
from pdcluster_api.plan.status.disaggregating import readable_rate
from pdcluster_schema import conditions as words
from pdcluster_schema.backoff import Backoff
from pdcluster_schema.text import shortened
from pdcluster_schema.workload import PoolPair

MAX_MESSAGE = 400
_TEXTS = {
    "at": "at",
    "request": "request",
    "fault": "fault",
    "message": "message",
    "decodeWorker": "decode_worker",
    "prefillWorker": "prefill_worker",
    "transport": "transport",
}
_NUMBERS = {
    "numTokens": "num_tokens",
    "numBytes": "num_bytes",
    "bytesPerSecond": "bytes_per_second",
}


@dataclass(frozen=True)
class VerifiedPair:
    """The last verification of a pair; num_failures: that did not pass, in a row."""

    verification: PairVerification
    num_failures: int = 0

    def as_status(self, pair: PoolPair) -> dict[str, Any]:
        """Its entry; what is empty or 0 is left out."""
        verified = self.verification
        fields = {
            **{name: getattr(verified, field) for name, field in _TEXTS.items()},
            **{name: getattr(verified, field) for name, field in _NUMBERS.items()},
            "message": shortened(verified.message, MAX_MESSAGE),
            "hasChecksum": verified.has_checksum,
            "numFailures": self.num_failures,
        }
        given = {name: value for name, value in fields.items() if value}
        return {"prefill": pair.prefill, "decode": pair.decode, **given}


def read_pairs(field: Mapping[str, Any], revision: str) -> dict[PoolPair, VerifiedPair]:
    """The pairs of a revision; entries that cannot be read are left out."""
    entries = field.get("pairs")
    if field.get("revision") != revision or not isinstance(entries, Sequence):
        return {}
    found = {}
    for entry in entries:
        if isinstance(entry, Mapping) and (read := _read(entry, revision)) is not None:
            found[PoolPair(str(entry.get("prefill")), str(entry.get("decode")))] = read
    return found


def _read(entry: Mapping[str, Any], revision: str) -> VerifiedPair | None:
    try:
        datetime.fromisoformat(entry["at"])
        known: dict[str, Any] = {
            **{field: str(entry.get(name, "")) for name, field in _TEXTS.items()},
            **{field: int(entry.get(name, 0)) for name, field in _NUMBERS.items()},
            "has_checksum": entry.get("hasChecksum") is True,
        }
        known["fault"] = known["fault"] or None
        verified = PairVerification(revision=revision, **known)
        return VerifiedPair(verified, max(0, int(entry.get("numFailures", 0))))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


FIELD = "transfers"
PERIOD_SECONDS = 3600.0  # Between two verifications of a pair that passes

RETRY = Backoff(first=60.0, most=PERIOD_SECONDS)  # Between two of a pair that does not pass

MAX_PAIRS = 64  # Pairs that are verified: eight pools of each role

_NAMED = 4
GIGA = 1_000_000_000

_REASONS = {
    "pair_refused": words.PAIR_REFUSED,
    "not_connected": words.TRANSFER_FAILED,
    "transfer_failed": words.TRANSFER_FAILED,
    "damaged": words.BLOCKS_DAMAGED,
    "not_used": words.TRANSFER_NOT_USED,
    "tokens_differ": words.TOKENS_DIFFER,
}
FAULTS = tuple(_REASONS)  # Faults as workers call them

Status = dict[str, Any]


@dataclass(frozen=True)
class Pairs:
    """Pairs of pools of the revision that serves."""

    revision: str
    # ready decode workers by pair; a pair is there too while no worker of a pool is ready
    workers: Mapping[PoolPair, tuple[str, ...]]

    @classmethod
    def of(cls, revision: str, workloads: Sequence[WorkloadState]) -> "Pairs":
        existing = [state for state in workloads if not state.gone]
        prefill = {state.id.pool: state for state in existing if state.id.role == PREFILL}
        decode = {state.id.pool: state for state in existing if state.id.role == "decode"}
        found = {
            PoolPair(source, sink): _ready(decode[sink]) if prefill[source].ready else ()
            for source in sorted(prefill)
            for sink in sorted(decode)
        }
        return cls(revision, dict(list(found.items())[:MAX_PAIRS]))


@dataclass(frozen=True)
class VerificationSettings:
    """Settings by which transfers are judged, and verified."""

    floor: float | None  # placement.minTransferGBps; None = any rate will do
    request: str  # value of the annotation pdcluster.io/verify; empty = none
    now: str  # RFC 3339


@dataclass(frozen=True)
class Transfers:
    """condition: None = of mixed workers.  requeue_after_seconds: until the next pair is due."""

    condition: Condition | None = None
    status: Status | None = None
    due: tuple[DueVerification, ...] = ()
    requeue_after_seconds: float | None = None

    @property
    def fields(self) -> Status:
        return {FIELD: self.status} if self.status else {}


def transfers(
    pairs: Pairs,
    previous: Previous,
    ended: Mapping[PoolPair, PairVerification],
    waits: Mapping[PoolPair, str],
    settings: VerificationSettings,
) -> Transfers:
    before = read_pairs(previous.mapping(FIELD), pairs.revision)
    known = {
        pair: _newer(before.get(pair), ended.get(pair), pairs, settings) for pair in pairs.workers
    }
    found = {pair: each for pair, each in known.items() if each is not None}
    due, seconds = [], []
    for pair, workers in pairs.workers.items():
        left = _seconds_left(found.get(pair), settings)
        if not workers:
            continue
        if left > 0:
            seconds.append(left)
        else:
            is_requested = _is_requested(found.get(pair), settings)
            due.append(
                DueVerification(pair, pairs.revision, workers, settings.request, is_requested)
            )
    return Transfers(
        _condition(pairs, found, waits, settings, previous.condition(words.KV_TRANSFER_VERIFIED)),
        {
            "revision": pairs.revision,
            "pairs": [found[pair].as_status(pair) for pair in sorted(found)],
        }
        if found
        else None,
        tuple(due),
        min(seconds, default=None),
    )


def is_slow(verified: PairVerification, floor: float | None) -> bool:
    """Return whether KV moved, and slower than the floor; a rate that was not measured is not."""
    if floor is None or verified.fault is not None or not verified.bytes_per_second:
        return False
    return verified.bytes_per_second < floor * GIGA


def is_unmeasured(verified: PairVerification, floor: float | None) -> bool:
    return floor is not None and verified.fault is None and not verified.bytes_per_second


def problem_of(verified: PairVerification, floor: float | None) -> Problem | None:
    """The problem of a pair that does not pass; None = it does."""
    if verified.fault is not None:
        return Problem(_REASONS.get(verified.fault, words.TRANSFER_FAILED), verified.message)
    if not is_slow(verified, floor):
        return None
    rate = readable_rate(verified.bytes_per_second)
    return Problem(
        words.TRANSFER_SLOW,
        f"KV moved at {rate} over {verified.transport}, less than placement.minTransferGBps of "
        f"{floor:g}: see whether the transport is the one that you meant, and the network between "
        f"{verified.prefill_worker} and {verified.decode_worker}",
    )


def figures_of(verified: PairVerification) -> str:
    rate = verified.bytes_per_second
    at = f" at {readable_rate(rate)} in this verification" if rate else ""
    size = f"{readable_rate(verified.num_bytes).removesuffix('/s')} " if verified.num_bytes else ""
    equal = "checksums and " if verified.has_checksum else ""
    return f"{size}over {verified.transport}{at}, {equal}{verified.num_tokens} tokens equal"


def _ready(state: WorkloadState) -> tuple[str, ...]:
    return tuple(pod.name for pod in state.pods if pod.ready and not pod.terminating)


def _newer(
    before: VerifiedPair | None,
    ended: PairVerification | None,
    pairs: Pairs,
    settings: VerificationSettings,
) -> VerifiedPair | None:
    """State of a pair: as in the last status, or a verification that has ended since."""
    if ended is None or ended.revision != pairs.revision:
        return before
    if before is not None and _is_known(ended, before.verification, settings.now):
        return before
    num_failures = 0 if _passes(ended, settings) else 1 + (before.num_failures if before else 0)
    return VerifiedPair(ended, num_failures)


def _passes(verified: PairVerification, settings: VerificationSettings) -> bool:
    has_problem = problem_of(verified, settings.floor) is not None
    return not (has_problem or is_unmeasured(verified, settings.floor))


def _is_known(ended: PairVerification, last: PairVerification, now: str) -> bool:
    """Return whether the status has it, or a later one.  One that is later than now was written
    before the clock was set back: were it to count, pairs would be verified again and again.
    """
    is_same = (ended.at, ended.request) == (last.at, last.request)
    return is_same or ended.at < last.at <= now


def _is_requested(found: VerifiedPair | None, settings: VerificationSettings) -> bool:
    return bool(settings.request) and (
        found is None or found.verification.request != settings.request
    )


def _seconds_left(found: VerifiedPair | None, settings: VerificationSettings) -> float:
    """Seconds until a pair is due; 0 = now."""
    if found is None or _is_requested(found, settings):
        return 0.0
    wait = (
        PERIOD_SECONDS
        if _passes(found.verification, settings)
        else RETRY.after(max(1, found.num_failures))
    )
    age = datetime.fromisoformat(settings.now) - datetime.fromisoformat(found.verification.at)
    # a clock that was set back must not hold it up
    return max(0.0, wait - abs(age.total_seconds()))


def _condition(
    pairs: Pairs,
    found: Mapping[PoolPair, VerifiedPair],
    waits: Mapping[PoolPair, str],
    settings: VerificationSettings,
    before: Mapping[str, Any],
) -> Condition:
    kind = words.KV_TRANSFER_VERIFIED
    problems = {
        pair: problem
        for pair, each in found.items()
        if (problem := problem_of(each.verification, settings.floor)) is not None
    }
    if problems:
        pair, problem = next(iter(sorted(problems.items())))
        more = f" (and {len(problems) - 1} more pairs of pools)" if len(problems) > 1 else ""
        return Condition.false(kind, problem.reason, f"{_named(pair)}{more}: {problem.message}")
    open_pairs = [pair for pair, workers in pairs.workers.items() if workers and pair not in found]
    if found and not open_pairs:
        unmeasured = [
            pair
            for pair, each in sorted(found.items())
            if is_unmeasured(each.verification, settings.floor)
        ]
        if unmeasured:
            return _unmeasured(unmeasured, settings.floor)
        return Condition.true(kind, words.KV_MOVED, _moved(found))
    if open_pairs:
        text = _not_yet(open_pairs[0], waits, str(before.get("message", "")))
    else:
        text = "no pair of pools has a ready prefill worker and a ready decode worker"
    return Condition.unknown(kind, words.NOT_VERIFIED, text)


def _unmeasured(pairs: Sequence[PoolPair], floor: float | None) -> Condition:
    """The condition of KV that moved at a rate that is not known."""
    more = f" (and {len(pairs) - 1} more pairs of pools)" if len(pairs) > 1 else ""
    text = (
        f"{_named(pairs[0])}{more}: KV moved, and its rate was not measured, so it is not known "
        f"whether it reaches placement.minTransferGBps of {floor:g}"
    )
    kind = words.KV_TRANSFER_VERIFIED
    return Condition.unknown(kind, words.RATE_NOT_MEASURED, text)


def _not_yet(pair: PoolPair, waits: Mapping[PoolPair, str], before: str) -> str:
    """Name what a pair waits for; as it was until that is known again, after a restart too."""
    begun = f"{_named(pair)} is not verified yet: "
    if pair not in waits and before.startswith(begun):
        return before
    return begun + waits.get(pair, "it is verified as soon as both have no request")


def _moved(found: Mapping[PoolPair, VerifiedPair]) -> str:
    moved = [
        f"{_named(pair)}: {figures_of(each.verification)}" for pair, each in sorted(found.items())
    ]
    more = len(moved) - _NAMED
    return "; ".join([*moved[:_NAMED], *([f"and {more} more pairs"] if more > 0 else [])])


def _named(pair: PoolPair) -> str:
    return f"prefill pool {pair.prefill} to decode pool {pair.decode}"
