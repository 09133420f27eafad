"""A length threshold that follows what is measured: the policy `sloFeedback`.

Two lines, seconds to the first token over uncached tokens, are kept of the
requests that were prefilled here and elsewhere recently.  The threshold goes
where the lines cross: down while a prompt of just its length is better off
elsewhere, up while it is better off here, one step at a time, within its
bounds, and not at all while both are about equal (hysteresis).  Decodes that
miss their pace lower it too, since the prefills here delay them.
A side that has not been seen for a while gets one prompt as a probe, whatever
its length: so a side that has become better is found out, at little cost.
Pure: time is passed in.
"""

from math import inf
from typing import Literal

from pdcluster_worker.config.routing import SloFeedbackPolicy

Side = Literal["local", "remote"]

STEP = 1.25
"""The threshold is multiplied or divided by this."""

ADJUST_SECONDS = 1.0
"""Shortest time between two steps: the effect of the last one must show first."""

MIN_SAMPLES = 4
"""Fewest samples of a side before its line is used."""

PROBE_SECONDS = 30.0
"""Without a sample for so long a side gets a probe; sooner while it has too few samples."""

_KEPT = 0.9
"""Weight of all older samples at each new one: about the last ten count."""

_KEPT_OF_OLD = 0.25
"""And of those before a gap of PROBE_SECONDS, beside that."""

_FLAT = 1e-4
"""Share of the squared mean length: with less variance than that no slope is read from it."""


class _Fit:
    """Seconds over tokens: least squares, with weights that fade."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.seen_at = -inf
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        return self.num_samples >= MIN_SAMPLES

    def add(self, tokens: float, seconds: float, now: float) -> None:
        kept = (
            _KEPT * _KEPT_OF_OLD ** ((now - self.seen_at) / PROBE_SECONDS)
            if self.num_samples
            else 0.0
        )
        self.num_samples += 1
        self.seen_at = now
        self._weight = kept * self._weight + 1
        self._x = kept * self._x + tokens
        self._y = kept * self._y + seconds
        self._xx = kept * self._xx + tokens * tokens
        self._xy = kept * self._xy + tokens * seconds

    def slope(self) -> float | None:
        """Seconds a token; None where all prompts were of one length."""
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        if variance <= _FLAT * max(1.0, x * x):
            return None
        return max(0.0, (self._xy / self._weight - x * y) / variance)

    def at(self, tokens: float, slope: float) -> float:
        """Seconds of a prompt of that length; never below 0."""
        x, y = self._x / self._weight, self._y / self._weight
        return max(0.0, y + slope * (tokens - x))


class SloFeedback:
    """One per decode worker."""

    def __init__(self) -> None:
        self._fits: dict[Side, _Fit] = {"local": _Fit(), "remote": _Fit()}
        self._tpot = 0.0
        self._tpot_at = -inf
        self._threshold: float | None = None
        self._moved_at = -inf
        self._probed_at: dict[Side, float] = {}

    def first_token(self, side: Side, uncached_tokens: int, seconds: float, now: float) -> None:
        """A prompt was computed there; seconds: from when it was sent there to its first
        token.
        """
        self._fits[side].add(uncached_tokens, seconds, now)

    def finished(self, seconds_per_token: float, now: float) -> None:
        """A request of this worker ended; seconds_per_token: after its first."""
        is_first = now - self._tpot_at > PROBE_SECONDS
        self._tpot = (
            seconds_per_token if is_first else _KEPT * self._tpot + (1 - _KEPT) * seconds_per_token
        )
        self._tpot_at = now

    def threshold(self, policy: SloFeedbackPolicy, configured: int, now: float) -> int:
        """The threshold in force now, in uncached tokens.  configured: where it starts."""
        low, high = policy.min_threshold, policy.max_threshold
        current = min(max(self._threshold or configured, low), high)
        if now - self._moved_at >= ADJUST_SECONDS:
            current, self._moved_at = (
                min(max(current * self._direction(policy, current, now), low), high),
                now,
            )
        self._threshold = current
        return round(current)

    def threshold_for(
        self, uncached_tokens: int, policy: SloFeedbackPolicy, configured: int, now: float
    ) -> int:
        """The threshold for a prompt of that length: the one in force, or one that makes it a
        probe.
        """
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

    def _direction(self, policy: SloFeedbackPolicy, current: float, now: float) -> float:
        """Factor of the threshold."""
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
        """Seconds of a prompt of that length here and elsewhere; of one length alone, with the
        other's slope.
        """
        local, remote = self._fits["local"], self._fits["remote"]
        local_fit, there = local.slope(), remote.slope()
        return local.at(tokens, _first(local_fit, there)), remote.at(
            tokens, _first(there, local_fit)
        )


def _first(*slopes: float | None) -> float:
    return next((slope for slope in slopes if slope is not None), 0.0)
