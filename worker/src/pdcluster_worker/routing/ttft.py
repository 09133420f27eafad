"""Measured times to first token, local and remote, for the policies that go by them."""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from pdcluster_schema.routing import SloFeedbackSpec
from pdcluster_worker.routing.offload import OffloadDecision, OffloadFacts

Side = Literal["local", "remote"]

STEP = 1.25  # factor of one change of the threshold

ADJUST_SECONDS = 1.0  # the effect of a change must show before the next

MIN_SAMPLES = 4  # of a side, before its figures are used

PROBE_SECONDS = 30.0  # without a sample for so long a side gets a probe; sooner with too few

_KEPT = 0.9  # weight of older samples at each new one: about the last ten count

_KEPT_OF_OLD = 0.25  # and of those before a gap of PROBE_SECONDS

_FLAT = 1e-4  # with less variance, as a share of the squared mean length, no slope is fitted


class _Fit:
    """Seconds over tokens: least squares with fading weights."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.seen_at = -inf
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        return self.num_samples >= MIN_SAMPLES

    def add(self, tokens: float, seconds: float, now: float) -> None:
        kept = _KEPT * _KEPT_OF_OLD ** ((now - self.seen_at) / PROBE_SECONDS)
        self.num_samples += 1
        self.seen_at = now
        self._weight = kept * self._weight + 1
        self._x = kept * self._x + tokens
        self._y = kept * self._y + seconds
        self._xx = kept * self._xx + tokens * tokens
        self._xy = kept * self._xy + tokens * seconds

    def slope(self) -> float | None:
        """Seconds a token; None where all prompts have one length."""
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        if variance <= _FLAT * max(1.0, x * x):
            return None
        return max(0.0, (self._xy / self._weight - x * y) / variance)

    def at(self, tokens: float, slope: float) -> float:
        x, y = self._x / self._weight, self._y / self._weight
        return max(0.0, y + slope * (tokens - x))


class SloFeedback:
    """Policy `sloFeedback`: a length threshold that follows measured time to first token.

    It moves in steps to where the fitted lines (seconds over uncached tokens) of local and remote
    prefill cross.  A side without recent samples gets a prompt as a probe.  One per decode worker.
    """

    def __init__(self) -> None:
        self._fits: dict[Side, _Fit] = {"local": _Fit(), "remote": _Fit()}
        self._tpot = 0.0
        self._tpot_at = -inf
        self._threshold: float | None = None
        self._moved_at = -inf
        self._probed_at: dict[Side, float] = {}

    def first_token(self, side: Side, uncached_tokens: int, seconds: float, now: float) -> None:
        """seconds: from dispatch to the first token."""
        self._fits[side].add(uncached_tokens, seconds, now)

    def finished(self, seconds_per_token: float, now: float) -> None:
        """seconds_per_token: after the first."""
        is_first = now - self._tpot_at > PROBE_SECONDS
        self._tpot = (
            seconds_per_token if is_first else _KEPT * self._tpot + (1 - _KEPT) * seconds_per_token
        )
        self._tpot_at = now

    def threshold(self, policy: SloFeedbackSpec, configured: int, now: float) -> int:
        """In uncached tokens.  configured: its start value."""
        low, high = policy.min_threshold, policy.max_threshold
        current = min(max(self._threshold or configured, low), high)
        if now - self._moved_at >= ADJUST_SECONDS:
            self._moved_at = now
            current = min(max(current * self._direction(policy, current, now), low), high)
        self._threshold = current
        return round(current)

    def threshold_for(
        self, uncached_tokens: int, policy: SloFeedbackSpec, configured: int, now: float
    ) -> int:
        """The current threshold, or one that makes this prompt a probe."""
        threshold = self.threshold(policy, configured, now)
        side: Side = "remote" if uncached_tokens < threshold else "local"
        if uncached_tokens < policy.min_threshold or not self._needs_probe(side, now):
            return threshold
        self._probed_at[side] = now
        return uncached_tokens if side == "remote" else uncached_tokens + 1

    def _needs_probe(self, side: Side, now: float) -> bool:
        fit = self._fits[side]
        since = max(fit.seen_at, self._probed_at.setdefault(side, now))
        return now - since >= (PROBE_SECONDS if fit.is_known else PROBE_SECONDS / MIN_SAMPLES)

    def _direction(self, policy: SloFeedbackSpec, current: float, now: float) -> float:
        if not all(fit.is_known for fit in self._fits.values()):
            return 1.0
        local, remote = self._at(current)
        margin = 1 + policy.margin
        is_slow = (
            now - self._tpot_at <= PROBE_SECONDS
            and 1000 * self._tpot > margin * policy.tpot_slo_milliseconds
        )
        if is_slow and 1000 * remote <= max(policy.ttft_slo_milliseconds, 1000 * local):
            return 1 / STEP
        if margin * remote < local:
            return 1 / STEP
        return STEP if margin * local < remote else 1.0

    def _at(self, tokens: float) -> tuple[float, float]:
        """(local, remote) seconds of a prompt; a side without a slope uses the other's."""
        local, remote = self._fits["local"], self._fits["remote"]
        own, other = local.slope(), remote.slope()
        own, other = (other if own is None else own), (own if other is None else other)
        return local.at(tokens, own or 0.0), remote.at(tokens, other or 0.0)


MANY_SAMPLES = 16  # of one side, before the other, never measured, gets a probe

PROBE_GAP = 50  # prompts between two probes; a sixth of it while the side is not known

# reasons of decisions that a probe may override
_FREE = frozenset({"short", "long", "queue", "decode_load", "slower", "faster"})

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
    """Expected time to first token on each side: the guard of the policy `measured`.

    Queued prompt tokens over the recent rate, plus the prompt's own, plus an average overhead.  One
    per decode worker.
    """

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
