"""RWT estimator of QLM with online parameters; cheap and conservative."""

from collections.abc import Sequence

from pdcluster_worker.routing.waiting_time.rates import LruDict, PrefillRate, Presets
from pdcluster_worker.routing.waiting_time.request_queue import (
    Completion,
    GroupSeconds,
    QueuedRequest,
    QueueState,
)

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
    """T(n) = (n - 1) * mean_output / theta + P + max_output * d_eff of QLM, theta = 1 / d_eff.

    token_seconds: d_eff; prefill_seconds: P; lanes: requests served at a time, 1 in QLM.

    >>> round(completion_seconds(10, mean_output=2646, max_output=8192, token_seconds=0.01027), 1)
    328.7
    """
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


class RwtEstimator:
    def __init__(
        self, presets: Presets, *, adapts_decode: bool = True, adapts_output: bool = True
    ) -> None:
        self._adapts_decode = adapts_decode
        self._adapts_output = adapts_output
        self._decode = DecodeTime(presets.token_seconds)
        self._output = MeanOutput(presets.output_tokens)
        self._prefill = PrefillRate(presets.prefill_tokens_per_second)

    def observe(self, completion: Completion) -> None:
        """Short answers change only the prefill rate."""
        self._prefill.observe(completion.prompt_tokens, completion.prefill_seconds)
        if self._adapts_decode and completion.decode_seconds is not None:
            self._decode.observe(completion.decode_seconds, completion.output_tokens)
        if self._adapts_output:
            self._output.observe(completion.group, completion.output_tokens)

    def group_seconds(self, members: Sequence[QueuedRequest], slots: int) -> GroupSeconds | None:
        """T(n), which is all work: QLM adds the T(n) of the groups before."""
        token_seconds = self._decode.seconds
        if token_seconds is None:
            return None
        total = completion_seconds(
            len(members),
            mean_output=self._output.tokens(members[0].group),
            max_output=max(request.max_tokens for request in members),
            token_seconds=token_seconds,
            prefill_seconds=self._prefill.seconds(members[0].prompt_tokens),
            lanes=slots,
        )
        return GroupSeconds(total, total)

    def estimated_ttft_seconds(self, request: QueuedRequest, queue: QueueState) -> float | None:
        """A slot is free once enough answers ahead have ended; then prefills and one token."""
        token_seconds = self._decode.seconds
        if token_seconds is None:
            return None
        requests = queue.requests
        ahead = requests.ahead(request)
        beyond = len(requests.running) + ahead.num_requests + 1 - queue.slots
        mean = sum(
            number * self._output.tokens(group) for group, number in requests.by_group.items()
        ) / max(1, len(requests))
        wait = max(0, beyond) / max(1, queue.slots) * mean * token_seconds
        prompts = request.prompt_tokens + ahead.prompt_tokens
        return wait + self._prefill.seconds(prompts) + token_seconds

    def estimated_completion_seconds(
        self, request: QueuedRequest, queue: QueueState
    ) -> float | None:
        """With the longest answer that it may give."""
        first, token_seconds = self.estimated_ttft_seconds(request, queue), self._decode.seconds
        if first is None or token_seconds is None:
            return None
        return first + (request.max_tokens - 1) * token_seconds
