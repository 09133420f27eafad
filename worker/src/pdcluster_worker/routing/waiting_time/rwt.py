"""RWT estimator of QLM: completion time of a request group.

T(n) = (n - 1) * mean_output / theta + P + max_output * d_eff, theta = 1 / d_eff.
"""

from pdcluster_worker.routing.waiting_time.lru_dict import LruDict

MIN_TOKENS = 50  # of an answer; shorter ones count neither for d_eff nor for the mean length

MIN_SAMPLES = 5  # completions before a measured value replaces a preset

ALPHA = 0.1  # weight of the newest completion in d_eff

MAX_GROUPS = 64  # beyond it the least recently used group is dropped


def completion_seconds(
    num_requests: int,
    *,
    mean_output: float,
    max_output: float,
    token_seconds: float,
    prefill_seconds: float = 0.0,
    lanes: int = 1,
) -> float:
    """T(n).  token_seconds: d_eff; prefill_seconds: P; lanes: requests served at a time, 1 in QLM.

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
    """d_eff: seconds of one output token, an exponential average; the preset until MIN_SAMPLES."""

    def __init__(self, preset_seconds: float | None) -> None:
        self._preset = self._average = preset_seconds
        self._num_samples = 0

    def observe(self, decode_seconds: float, output_tokens: int) -> None:
        """decode_seconds: the request's duration without its prefill."""
        if output_tokens < MIN_TOKENS:
            return
        observed = decode_seconds / output_tokens
        before = observed if self._average is None else self._average
        self._average = ALPHA * observed + (1.0 - ALPHA) * before
        self._num_samples += 1

    @property
    def seconds(self) -> float | None:
        """None without a preset and with too few completions."""
        return self._average if self._num_samples >= MIN_SAMPLES else self._preset


class MeanOutput:
    """mu: mean output tokens of each group; the preset until MIN_SAMPLES of the group."""

    def __init__(self, preset_tokens: float) -> None:
        self._preset = preset_tokens
        self._seen: LruDict[tuple[int, int]] = LruDict(MAX_GROUPS)  # samples, tokens

    def observe(self, group: str, output_tokens: int) -> None:
        if output_tokens >= MIN_TOKENS:
            samples, tokens = self._seen.get(group, (0, 0))
            self._seen.put(group, (samples + 1, tokens + output_tokens))

    def tokens(self, group: str) -> float:
        samples, tokens = self._seen.get(group, (0, 0))
        return tokens / samples if samples >= MIN_SAMPLES else self._preset
