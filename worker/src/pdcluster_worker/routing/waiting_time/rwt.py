"""The completion time of a request group as the RWT estimator of QLM gives it, with online
parameters.

T(n) = (n - 1) * mean_output / theta + P + max_output * d_eff, theta = 1 / d_eff.
The last request is taken at its worst, so T is too high for short groups: for
n = 1 it is an upper bound.  Parameters start from presets and are kept
until enough completions were seen.
"""

from pdcluster_worker.routing.waiting_time.lru_dict import LruDict

MIN_TOKENS = 50
"""Shorter answers say little about the time of a token, and are not counted in the mean length
either.
"""

MIN_SAMPLES = 5
"""So many valid completions before a measured value takes the place of a preset."""

ALPHA = 0.1
"""Weight of the newest completion in the average of d_eff."""

MAX_GROUPS = 64
"""Request groups whose lengths are kept; the one that was used least recently goes."""


def completion_seconds(
    num_requests: int,
    *,
    mean_output: float,
    max_output: float,
    token_seconds: float,
    prefill_seconds: float = 0.0,
    lanes: int = 1,
) -> float:
    """T(n): seconds until a group of that many requests is complete; 0 for none.

    mean_output, max_output: tokens of an answer.
    token_seconds:           d_eff, of one output token.
    prefill_seconds:         P, of one prompt.
    lanes:                   requests that are served at a time; the source document has 1.

    >>> round(completion_seconds(10, mean_output=2646, max_output=8192, token_seconds=0.01027), 1)
    328.7
    """
    if num_requests <= 0:
        return 0.0
    return (
        (num_requests - 1) / lanes * mean_output * token_seconds
        + prefill_seconds
        + max_output * token_seconds
    )


class DecodeTime:
    """d_eff: seconds of one output token, an exponential average over completions.

    It starts at the preset, or at the first completion where there is none, and moves with each
    valid one. `seconds` is the preset until MIN_SAMPLES of them.
    """

    def __init__(self, preset_seconds: float | None) -> None:
        self._preset = self._average = preset_seconds
        self._num_samples = 0

    def observe(self, decode_seconds: float, output_tokens: int) -> None:
        """decode_seconds: the request's duration less its prefill."""
        if output_tokens < MIN_TOKENS:
            return
        observed = decode_seconds / output_tokens
        before = observed if self._average is None else self._average
        self._average = ALPHA * observed + (1.0 - ALPHA) * before
        self._num_samples += 1

    @property
    def seconds(self) -> float | None:
        """The time of one output token; None without a preset and too few completions."""
        return self._average if self._num_samples >= MIN_SAMPLES else self._preset


class MeanOutput:
    """mu: the running mean of output tokens, one for each request group."""

    def __init__(self, preset_tokens: float) -> None:
        self._preset = preset_tokens
        self._seen: LruDict[tuple[int, int]] = LruDict(MAX_GROUPS)  # samples, tokens

    def observe(self, group: str, output_tokens: int) -> None:
        """Take a completed request."""
        if output_tokens >= MIN_TOKENS:
            samples, tokens = self._seen.get(group, (0, 0))
            self._seen.put(group, (samples + 1, tokens + output_tokens))

    def tokens(self, group: str) -> float:
        """The group's mean, or the preset until MIN_SAMPLES of its own were seen."""
        samples, tokens = self._seen.get(group, (0, 0))
        return tokens / samples if samples >= MIN_SAMPLES else self._preset
