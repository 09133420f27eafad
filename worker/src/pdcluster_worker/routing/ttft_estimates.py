"""Expected time to first token, local and remote: the guard of the policy `measured`.

Queued prompt tokens over the recent rate, plus the prompt's own, plus an average overhead.
"""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from pdcluster_worker.routing.offload import OffloadDecision, OffloadFacts

Side = Literal["local", "remote"]

MIN_SAMPLES = 4  # of a side, before its estimate is used

MANY_SAMPLES = 16  # of one side, before the other, never measured, gets a probe

PROBE_SECONDS = 30.0  # without a sample for so long a side gets a probe

PROBE_GAP = 50  # prompts between two probes; a sixth of it while the side is not known

# reasons of decisions that a probe may override
_FREE = frozenset({"short", "long", "queue", "decode_load", "slower", "faster"})

_KEPT = 0.9  # weight of older samples at each new one

_LEAST_SECONDS = 1e-6  # smallest estimate, as 0 means not measured


@dataclass(slots=True)
class _PendingPrompt:
    tokens: int
    began: float  # seconds
    expected: float | None  # seconds without overhead; None = unknown


@dataclass(slots=True)
class _SideEstimate:
    waiting: dict[str, _PendingPrompt] = field(default_factory=dict)  # by request
    num_samples: int = 0
    seen_at: float = -inf
    settled_at: float = 0.0  # last first token, or arrival at a free side
    _tokens: float = 0.0
    _seconds: float = 0.0
    _overhead_seconds: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.num_samples >= MIN_SAMPLES

    def take(self, tokens: int, seconds: float, now: float) -> None:
        self._tokens = _KEPT * self._tokens + tokens
        self._seconds = _KEPT * self._seconds + seconds
        self.num_samples += 1
        self.seen_at = now

    def correct(self, seconds: float) -> None:
        """seconds: by how much the estimate without overhead was too low."""
        self._overhead_seconds = _KEPT * self._overhead_seconds + (1 - _KEPT) * seconds

    def plain(self, tokens: int, others: int, num_workers: int, now: float) -> float:
        """Seconds of the queued prompts and of this one, without overhead."""
        rate = self._tokens / self._seconds
        queued = max(sum(sent.tokens for sent in self.waiting.values()), others)
        done = min(now - self.settled_at, self._first() / rate) if self.waiting else 0.0
        return max(0.0, queued / rate / max(1, num_workers) - done) + tokens / rate

    def expected(self, plain: float) -> float:
        return max(_LEAST_SECONDS, plain + self._overhead_seconds)

    def _first(self) -> int:
        return next(iter(self.waiting.values())).tokens


class TtftEstimates:
    """One per decode worker."""

    def __init__(self) -> None:
        self._sides: dict[Side, _SideEstimate] = {
            "local": _SideEstimate(),
            "remote": _SideEstimate(),
        }
        self._probed_at: dict[Side, float] = {}
        self._num_since = 0

    def seconds(
        self, side: Side, tokens: int, now: float, *, others: int = 0, num_workers: int = 1
    ) -> float:
        """0 = not measured yet.  others: prompt tokens queued there by all workers' reports."""
        at = self._sides[side]
        return at.expected(at.plain(tokens, others, num_workers, now)) if at.is_known else 0.0

    def known(
        self, facts: OffloadFacts, now: float, *, others: int = 0, num_workers: int = 1
    ) -> OffloadFacts:
        local = self.seconds("local", facts.uncached_tokens, now)
        remote = self.seconds(
            "remote", facts.uncached_tokens, now, others=others, num_workers=num_workers
        )
        return replace(facts, local_seconds=local, remote_seconds=remote)

    def or_probe(self, verdict: OffloadDecision, now: float) -> OffloadDecision:
        """The decision, or the other side when this prompt may be a probe and one is due."""
        unseen: Side = "local" if verdict.is_remote else "remote"
        if verdict.reason in _FREE and self.needs_probe(unseen, now):
            return OffloadDecision(not verdict.is_remote, "probe")
        return verdict

    def sent(
        self,
        side: Side,
        request_id: str,
        tokens: int,
        now: float,
        *,
        others: int = 0,
        num_workers: int = 1,
    ) -> None:
        """A prompt is queued on that side from now on."""
        at = self._sides[side]
        expected = at.plain(tokens, others, num_workers, now) if at.is_known else None
        if not at.waiting:
            at.settled_at = now
        at.waiting[request_id] = _PendingPrompt(tokens, now, expected)

    def first_token(
        self,
        side: Side,
        request_id: str,
        computed_tokens: int,
        prefill_seconds: float | None,
        now: float,
    ) -> None:
        """computed_tokens: without those in a prefix cache.  prefill_seconds: None = unknown."""
        at = self._sides[side]
        sent = at.waiting.pop(request_id, None)
        if sent is not None:
            at.settled_at = now
            if sent.expected is not None:
                at.correct(now - sent.began - sent.expected)
        if prefill_seconds is not None and prefill_seconds > 0 and computed_tokens > 0:
            at.take(computed_tokens, prefill_seconds, now)

    def ended(self, request_id: str) -> None:
        for at in self._sides.values():
            at.waiting.pop(request_id, None)

    def needs_probe(self, side: Side, now: float) -> bool:
        """Return whether a prompt should go to that side only to measure it; counts the call."""
        self._num_since += 1
        at = self._sides[side]
        other = self._sides["remote" if side == "local" else "local"]
        if not at.is_known and other.num_samples < MANY_SAMPLES:
            return False
        since = max(at.seen_at, self._probed_at.setdefault(side, now))
        is_long_ago = now - since >= (PROBE_SECONDS if at.is_known else PROBE_SECONDS / MIN_SAMPLES)
        if not is_long_ago or self._num_since < (PROBE_GAP if at.is_known else PROBE_GAP // 6):
            return False
        self._probed_at[side], self._num_since = now, 0
        return True
