"""Policy `sloFeedback`: a length threshold that follows measured time to first token.

It moves in steps to where the fitted lines (seconds over uncached tokens) of local and remote
prefill cross.  A side without recent samples gets a prompt as a probe.
"""

from math import inf
from typing import Literal

from pdcluster_schema.routing import SloFeedbackSpec

Side = Literal["local", "remote"]

STEP = 1.25  # factor of one change of the threshold

ADJUST_SECONDS = 1.0  # the effect of a change must show before the next

MIN_SAMPLES = 4  # of a side, before its line is used

# without a sample for so long a side gets a probe; sooner while it has too few
PROBE_SECONDS = 30.0

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
    """One per decode worker."""

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
            current, self._moved_at = (
                min(max(current * self._direction(policy, current, now), low), high),
                now,
            )
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
        local_fit, there = local.slope(), remote.slope()
        return local.at(tokens, _first(local_fit, there)), remote.at(
            tokens, _first(there, local_fit)
        )


def _first(*slopes: float | None) -> float:
    return next((slope for slope in slopes if slope is not None), 0.0)
