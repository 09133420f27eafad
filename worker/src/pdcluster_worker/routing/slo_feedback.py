"""A length threshold that follows what is measured: the policy `sloFeedback`.

Two lines, seconds to the first token over uncached tokens, are kept of the
requests that were prefilled here and elsewhere of late.  The threshold goes
where the lines cross: down while a prompt of just its length is better off
elsewhere, up while it is better off here, one step at a time, within its
bounds, and not at all while both are about equal (hysteresis).  Decodes that
miss their pace lower it too, for it is the prefills here that hold them up.
A side that has not been seen for a while is forgotten, and the threshold
drifts back to the configured one, so that both sides are measured again.
Pure: time is passed in.
"""

from math import inf
from typing import Literal

from pdcluster_worker.routing_config import SloFeedbackPolicy

Side = Literal["local", "remote"]

STEP = 1.25
"""The threshold is multiplied or divided by this."""

ADJUST_SECONDS = 1.0
"""Between two steps at least: what the last one did must show first."""

MIN_SAMPLES = 4
"""Of a side, before its line says anything."""

STALE_SECONDS = 30.0
"""Without a sample for so long a side is forgotten."""

_KEPT = 0.9
"""Weight of all older samples at each new one: about the last ten count."""

_FLAT = 1e-4
"""Of the squared mean length: with less variance than that no slope is read from it."""


class _Line:
    """Seconds over tokens: least squares, with weights that fade."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.seen_at = -inf
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: float, seconds: float, now: float) -> None:
        self.num_samples += 1
        self.seen_at = now
        kept = _KEPT
        self._weight = kept * self._weight + 1
        self._x = kept * self._x + tokens
        self._y = kept * self._y + seconds
        self._xx = kept * self._xx + tokens * tokens
        self._xy = kept * self._xy + tokens * seconds

    def is_known(self, now: float) -> bool:
        return self.num_samples >= MIN_SAMPLES and now - self.seen_at <= STALE_SECONDS

    def at(self, tokens: float) -> float:
        """Seconds of a prompt of that length; never below 0."""
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        if variance <= _FLAT * max(1.0, x * x):
            return y * tokens / max(1.0, x)  # prompts of one length: in proportion to it
        slope = max(0.0, (self._xy / self._weight - x * y) / variance)
        return max(0.0, y + slope * (tokens - x))


class SloFeedback:
    """One per decode worker."""

    def __init__(self) -> None:
        self._lines: dict[Side, _Line] = {"local": _Line(), "remote": _Line()}
        self._tpot = 0.0
        self._tpot_at = -inf
        self._threshold: float | None = None
        self._moved_at = -inf

    def first_token(self, side: Side, uncached_tokens: int, seconds: float, now: float) -> None:
        """A prompt was computed there; seconds: from its arrival here to its first token."""
        if now - self._lines[side].seen_at > STALE_SECONDS:
            self._lines[side] = _Line()
        self._lines[side].add(uncached_tokens, seconds, now)

    def finished(self, seconds_per_token: float, now: float) -> None:
        """A request of this worker ended; seconds_per_token: after its first."""
        is_first = now - self._tpot_at > STALE_SECONDS
        self._tpot = seconds_per_token if is_first else _KEPT * self._tpot + (1 - _KEPT) * seconds_per_token
        self._tpot_at = now

    def threshold(self, policy: SloFeedbackPolicy, configured: int, now: float) -> int:
        """The threshold in force now, in uncached tokens.  configured: where it starts and drifts back to."""
        low, high = policy.min_threshold, policy.max_threshold
        start = min(max(configured, low), high)
        current = start if self._threshold is None else min(max(self._threshold, low), high)
        if now - self._moved_at >= ADJUST_SECONDS:
            moved = current * self._direction(policy, current, start, now)
            if (current - start) * (moved - start) < 0 and not self._is_measured(now):
                moved = start  # a drift ends there
            current, self._moved_at = min(max(moved, low), high), now
        self._threshold = current
        return round(current)

    def _is_measured(self, now: float) -> bool:
        return all(line.is_known(now) for line in self._lines.values())

    def _direction(self, policy: SloFeedbackPolicy, current: float, start: float, now: float) -> float:
        """What the threshold is multiplied by."""
        if not self._is_measured(now):
            return 1.0 if current == start else STEP if current < start else 1 / STEP
        local, remote = self._lines["local"].at(current), self._lines["remote"].at(current)
        margin = 1 + policy.margin
        is_slow = now - self._tpot_at <= STALE_SECONDS and 1000 * self._tpot > margin * policy.tpot_slo_milliseconds
        if is_slow and 1000 * remote <= max(policy.ttft_slo_milliseconds, 1000 * local):
            return 1 / STEP
        if margin * remote < local:
            return 1 / STEP
        return STEP if margin * local < remote else 1.0
