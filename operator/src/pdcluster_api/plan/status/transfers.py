"""KVTransferVerified, `status.transfers`, and the pairs of pools to verify now. Pure; the status is
the memory. Ready does not follow: a failed transfer costs a local prefill.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic.alias_generators import to_camel

from pdcluster_api.plan.gates import Check
from pdcluster_api.plan.observed.pools import PREFILL
from pdcluster_api.plan.observed.state import PairVerification, Previous, Problem, WorkloadState
from pdcluster_api.plan.result import DueVerification
from pdcluster_api.plan.status.condition import Condition
from pdcluster_api.plan.status.disaggregating import readable_rate
from pdcluster_schema import conditions as words
from pdcluster_schema.backoff import Backoff
from pdcluster_schema.text import and_more, shortened
from pdcluster_schema.workload import PoolPair, WorkloadId

FIELD = "transfers"
MAX_MESSAGE = 400
MAX_PAIRS = 64  # Pairs that are verified: eight pools of each role
PERIOD_SECONDS = 3600.0  # Between two verifications of a pair that passes
RETRY = Backoff(first=60.0, most=PERIOD_SECONDS)  # Between two of a pair that does not pass
DOUBT_SECONDS = 10.0  # until the next one, at a gate that waits for it
LEAST_FAILURES = 2  # in a row, from which a transfer that failed counts at a gate
GIGA = 1_000_000_000

_TYPE = words.KV_TRANSFER_VERIFIED
_NAMED = 4
_REASONS = {
    "pair_refused": words.PAIR_REFUSED,
    "not_connected": words.TRANSFER_FAILED,
    "transfer_failed": words.TRANSFER_FAILED,
    "damaged": words.BLOCKS_DAMAGED,
    "not_used": words.TRANSFER_NOT_USED,
    "tokens_differ": words.TOKENS_DIFFER,
}

# faults that a worker may have once which is busy, restarts or ends
_PASSING = {"not_connected", "transfer_failed"}

_VERIFICATION = TypeAdapter(PairVerification)
# Fields of a verification, by their names in the status
_NAMES = {to_camel(each.name): each.name for each in fields(PairVerification)}
del _NAMES["revision"]  # is that of all pairs


@dataclass(frozen=True)
class VerifiedPair:
    """The last verification of a pair; num_failures: that did not pass, in a row."""

    verification: PairVerification
    num_failures: int = 0

    @property
    def is_doubtful(self) -> bool:
        """True if it failed as a pair may that is whole: a gate waits for the next one."""
        return self.verification.fault in _PASSING and self.num_failures < LEAST_FAILURES

    def as_status(self, pair: PoolPair) -> dict[str, Any]:
        """Its entry; what is empty or 0 is left out."""
        verified = asdict(self.verification)
        found = {name: verified[field] for name, field in _NAMES.items()}
        found |= {
            "message": shortened(self.verification.message, MAX_MESSAGE),
            "numFailures": self.num_failures,
        }
        given = {name: value for name, value in found.items() if value}
        return {"prefill": pair.prefill, "decode": pair.decode, **given}


def read_pairs(field: Mapping[str, Any], revision: str) -> dict[PoolPair, VerifiedPair]:
    """The pairs of a revision, of a status that any writer may have changed; entries that cannot be
    read are left out.
    """
    entries = field.get("pairs")
    if field.get("revision") != revision or not isinstance(entries, Sequence):
        return {}
    return {
        PoolPair(str(entry.get("prefill")), str(entry.get("decode"))): read
        for entry in entries
        if isinstance(entry, Mapping) and (read := _read(entry, revision)) is not None
    }


def _read(entry: Mapping[str, Any], revision: str) -> VerifiedPair | None:
    known = {field: entry[name] for name, field in _NAMES.items() if name in entry}
    try:
        datetime.fromisoformat(entry["at"])
        verified = _VERIFICATION.validate_python({**known, "revision": revision})
        return VerifiedPair(verified, max(0, int(entry.get("numFailures", 0))))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


Verified = TypeVar("Verified", PairVerification, VerifiedPair)


@dataclass(frozen=True)
class Pairs:
    """Pairs of pools of the revision that serves."""

    revision: str
    # ready decode workers by pair; a pair is there too while no worker of a pool is ready
    workers: Mapping[PoolPair, tuple[str, ...]]
    workloads: frozenset[WorkloadId] = frozenset()  # those that are there

    @classmethod
    def of(cls, revision: str, workloads: Sequence[WorkloadState]) -> "Pairs":
        existing = [state for state in workloads if not state.gone]
        # a pool has two while its role is replaced
        num_ready, decode = Counter[str](), defaultdict[str, tuple[str, ...]](tuple)
        for state in existing:
            if state.id.role == PREFILL:
                num_ready[state.id.pool] += state.ready - sum(pod.ready for pod in state.guests)
            elif state.id.role == "decode":
                decode[state.id.pool] += _ready(state)
        found = {
            PoolPair(source, sink): decode[sink] if num_ready[source] else ()
            for source in sorted(num_ready)
            for sink in sorted(decode)
        }
        there = frozenset(state.id for state in existing)
        return cls(revision, dict(list(found.items())[:MAX_PAIRS]), there)

    def known(self, found: Mapping[PoolPair, Verified]) -> dict[PoolPair, Verified]:
        """Without what workers have shown whose role has another template now: the new ones are to
        be verified themselves.
        """
        return {pair: each for pair, each in found.items() if self._is_of_these(each)}

    def _is_of_these(self, found: "PairVerification | VerifiedPair") -> bool:
        verified = found.verification if isinstance(found, VerifiedPair) else found
        return not any(
            self._has_gone(worker) for worker in (verified.decode_worker, verified.prefill_worker)
        )

    def _has_gone(self, worker: str) -> bool:
        """Return whether it is of a pool that is there, and of no workload of it."""
        pools = (f"{each.cluster}-{each.role}-{each.pool}-" for each in self.workloads)
        names = (f"{each.name}-" for each in self.workloads)
        return worker.startswith(tuple(pools)) and not worker.startswith(tuple(names))


def _ready(state: WorkloadState) -> tuple[str, ...]:
    """Workers of the pool itself: a pair is verified between those that its pools have."""
    pods = (pod for pod in state.pods if pod.name not in state.away)
    return tuple(pod.name for pod in pods if pod.ready and not pod.terminating)


@dataclass(frozen=True)
class VerificationSettings:
    floor: float | None  # placement.minTransferGBps; None = any rate will do
    request: str  # value of the annotation pdcluster.io/verify; empty = none
    now: str  # RFC 3339
    # RFC 3339: what is older says too little, and is verified again though workers are busy
    since: str = ""

    def problem(self, verified: PairVerification) -> Problem | None:
        """The problem of a pair that does not pass; None = it does, or its rate is unknown."""
        if verified.fault:
            return Problem(_REASONS.get(verified.fault, words.TRANSFER_FAILED), verified.message)
        if self.floor is None or not 0 < verified.bytes_per_second < self.floor * GIGA:
            return None
        message = (
            f"KV moved at {readable_rate(verified.bytes_per_second)} over {verified.transport}, "
            f"less than placement.minTransferGBps of {self.floor:g}: see whether the transport is "
            f"the one that you meant, and the network between {verified.prefill_worker} and "
            f"{verified.decode_worker}"
        )
        return Problem(words.TRANSFER_SLOW, message)

    def is_unmeasured(self, verified: PairVerification) -> bool:
        return self.floor is not None and not verified.fault and not verified.bytes_per_second

    def passes(self, verified: PairVerification) -> bool:
        return self.problem(verified) is None and not self.is_unmeasured(verified)

    def is_requested(self, found: VerifiedPair | None) -> bool:
        if self.since and (found is None or not self.is_recent(found.verification)):
            return True
        return bool(self.request) and (found is None or found.verification.request != self.request)

    def is_urgent(self, found: VerifiedPair | None) -> bool:
        """Return whether it is verified though workers are busy."""
        is_doubtful = bool(self.since) and found is not None and found.is_doubtful
        return is_doubtful or self.is_requested(found)

    def is_recent(self, verified: PairVerification) -> bool:
        return datetime.fromisoformat(verified.at) >= datetime.fromisoformat(self.since)

    def seconds_left(self, found: VerifiedPair | None) -> float:
        """Seconds until a pair is due; 0 = now."""
        if found is None or self.is_requested(found):
            return 0.0
        is_passed = self.passes(found.verification)
        wait = PERIOD_SECONDS if is_passed else RETRY.after(max(1, found.num_failures))
        if self.since and found.is_doubtful:
            wait = DOUBT_SECONDS
        age = datetime.fromisoformat(self.now) - datetime.fromisoformat(found.verification.at)
        # a clock that was set back must not hold it up
        return max(0.0, wait - abs(age.total_seconds()))

    def newer(
        self, before: VerifiedPair | None, ended: PairVerification | None, revision: str
    ) -> VerifiedPair | None:
        """State of a pair: as in the last status, or a verification that has ended since."""
        if ended is None or ended.revision != revision:
            return before
        if before is not None:
            # A later one than now was written before the clock was set back: were it to count,
            # pairs would be verified again and again.
            last = before.verification
            is_same = (ended.at, ended.request) == (last.at, last.request)
            if is_same or ended.at < last.at <= self.now:
                return before
        num_before = 0 if before is None else before.num_failures
        return VerifiedPair(ended, 0 if self.passes(ended) else 1 + num_before)


@dataclass(frozen=True)
class Transfers:
    """condition: None = of mixed workers.  requeue_after_seconds: until the next pair is due."""

    condition: Condition | None = None
    status: dict[str, Any] | None = None
    due: tuple[DueVerification, ...] = ()
    requeue_after_seconds: float | None = None
    check: Check | None = None  # of a gate, since `settings.since`; None = no pair is ready

    @property
    def fields(self) -> dict[str, Any]:
        return {FIELD: self.status} if self.status else {}


def transfers(
    pairs: Pairs,
    previous: Previous,
    ended: Mapping[PoolPair, PairVerification],
    waits: Mapping[PoolPair, str],
    settings: VerificationSettings,
) -> Transfers:
    before = pairs.known(read_pairs(previous.mapping(FIELD), pairs.revision))
    ended = pairs.known(ended)
    known = {
        pair: settings.newer(before.get(pair), ended.get(pair), pairs.revision)
        for pair in pairs.workers
    }
    found = {pair: each for pair, each in sorted(known.items()) if each is not None}
    ready = {pair: workers for pair, workers in pairs.workers.items() if workers}
    lefts = {pair: settings.seconds_left(found.get(pair)) for pair in ready}
    due = tuple(
        DueVerification(
            pair,
            pairs.revision,
            workers,
            settings.request,
            settings.is_urgent(found.get(pair)),
        )
        for pair, workers in ready.items()
        if not lefts[pair]
    )
    entries = [each.as_status(pair) for pair, each in found.items()]
    begun = [_not_yet(pair, waits, previous) for pair in ready if pair not in found]
    return Transfers(
        _condition(found, begun, settings),
        {"revision": pairs.revision, "pairs": entries} if found else None,
        due,
        min((left for left in lefts.values() if left), default=None),
        _check({pair: found.get(pair) for pair in ready}, waits, settings),
    )


def _check(
    found: Mapping[PoolPair, VerifiedPair | None],
    waits: Mapping[PoolPair, str],
    settings: VerificationSettings,
) -> Check | None:
    if not settings.since or not found:
        return None
    recent = {
        pair: each
        for pair, each in found.items()
        if each is not None and settings.is_recent(each.verification)
    }
    problems = [(pair, settings.problem(each.verification)) for pair, each in recent.items()]
    failed = [(pair, each) for pair, each in problems if each is not None]
    if failed:
        pair, problem = min(failed, key=lambda each: recent[each[0]].is_doubtful)
        text = f"{_TYPE}, {problem.reason}: {_named(pair)}: {problem.message}"
        if not recent[pair].is_doubtful:
            return Check("False", text)
        return Check("Unknown", f"{text}; it counts once it has failed {LEAST_FAILURES} times")
    unknown = [pair for pair in found if pair not in recent]
    if unknown:
        why = waits.get(unknown[0], "no worker has answered yet")
        return Check("Unknown", f"{_TYPE}: {_named(unknown[0])} is not verified: {why}")
    verified = {pair: each.verification for pair, each in recent.items()}
    unmeasured = [pair for pair, each in verified.items() if settings.is_unmeasured(each)]
    if unmeasured:
        return Check("Unknown", f"{_TYPE}: {_named(unmeasured[0])}: its rate was not measured")
    pair, first = next(iter(verified.items()))
    return Check("True", f"{_named(pair)}: {_figures(first)}{and_more(len(verified))}")


def _condition(
    found: Mapping[PoolPair, VerifiedPair], begun: Sequence[str], settings: VerificationSettings
) -> Condition:
    """begun: of each pair that is not verified yet, what it waits for"""
    verified = {pair: each.verification for pair, each in found.items()}
    problems = {
        pair: problem
        for pair, each in verified.items()
        if (problem := settings.problem(each)) is not None
    }
    if problems:
        first = next(iter(problems.values()))
        return Condition.false(_TYPE, first.reason, f"{_first_of(problems)}: {first.message}")
    if begun:
        return Condition.unknown(_TYPE, words.NOT_VERIFIED, begun[0])
    if not found:
        text = "no pair of pools has a ready prefill worker and a ready decode worker"
        return Condition.unknown(_TYPE, words.NOT_VERIFIED, text)
    unmeasured = {pair: each for pair, each in verified.items() if settings.is_unmeasured(each)}
    if unmeasured:
        text = (
            f"{_first_of(unmeasured)}: KV moved, and its rate was not measured, so it is not known "
            f"whether it reaches placement.minTransferGBps of {settings.floor:g}"
        )
        return Condition.unknown(_TYPE, words.RATE_NOT_MEASURED, text)
    moved = [f"{_named(pair)}: {_figures(each)}" for pair, each in verified.items()]
    more = [f"and {len(moved) - _NAMED} more pairs"] if len(moved) > _NAMED else []
    return Condition.true(_TYPE, words.KV_MOVED, "; ".join([*moved[:_NAMED], *more]))


def _not_yet(pair: PoolPair, waits: Mapping[PoolPair, str], previous: Previous) -> str:
    """Name what a pair waits for; as it was until that is known again, after a restart too."""
    begun = f"{_named(pair)} is not verified yet: "
    before = str(previous.condition(_TYPE).get("message", ""))
    if pair not in waits and before.startswith(begun):
        return before
    return begun + waits.get(pair, "it is verified as soon as both have no request")


def _figures(verified: PairVerification) -> str:
    rate = verified.bytes_per_second
    at = f" at {readable_rate(rate)} in this verification" if rate else ""
    size = f"{readable_rate(verified.num_bytes).removesuffix('/s')} " if verified.num_bytes else ""
    equal = "checksums and " if verified.has_checksum else ""
    return f"{size}over {verified.transport}{at}, {equal}{verified.num_tokens} tokens equal"


def _first_of(pairs: Mapping[PoolPair, object]) -> str:
    return f"{_named(next(iter(pairs)))}{and_more(len(pairs), ' pairs of pools')}"


def _named(pair: PoolPair) -> str:
    return f"prefill pool {pair.prefill} to decode pool {pair.decode}"
