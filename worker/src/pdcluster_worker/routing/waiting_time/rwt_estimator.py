"""Estimator `rwt`: QLM's RWT with online parameters; cheap and conservative."""

from collections.abc import Collection

from pdcluster_worker.routing.estimator import Completion, QueuedRequest, QueueState
from pdcluster_worker.routing.waiting_time.prefill_rate import PrefillRate
from pdcluster_worker.routing.waiting_time.presets import Presets
from pdcluster_worker.routing.waiting_time.request_queue import queue_of
from pdcluster_worker.routing.waiting_time.rwt import DecodeTime, MeanOutput, completion_seconds


class RwtEstimator:
    def __init__(
        self, presets: Presets, *, adapts_decode: bool = True, adapts_output: bool = True
    ) -> None:
        self._presets = presets
        self._adapts_decode = adapts_decode
        self._adapts_output = adapts_output
        self._decode = DecodeTime(presets.token_seconds)
        self._output = MeanOutput(presets.output_tokens)
        self._prefill = PrefillRate(presets.prefill_tokens_per_second)

    def observe(self, completion: Completion) -> None:
        """Short answers change only the prefill rate."""
        self._prefill.observe(completion.prompt_tokens, completion.prefill_seconds)
        if self._adapts_decode:
            self._decode.observe(completion.decode_seconds, completion.output_tokens)
        if self._adapts_output:
            self._output.observe(completion.group, completion.output_tokens)

    def group_seconds(self, members: Collection[QueuedRequest], slots: int) -> float | None:
        """T(n) of a group, from the start of its first request to the end of its last."""
        token_seconds = self._decode.seconds
        if token_seconds is None:
            return None
        if not members:
            return 0.0
        first = next(iter(members))
        return completion_seconds(
            len(members),
            mean_output=self._output.tokens(first.group),
            max_output=max(request.max_tokens for request in members),
            token_seconds=token_seconds,
            prefill_seconds=self._prefill.seconds(first.prompt_tokens),
            lanes=slots,
        )

    def estimated_ttft_seconds(self, request: QueuedRequest, queue: QueueState) -> float | None:
        """A slot is free once enough answers ahead have ended; then prefills and one token."""
        token_seconds = self._decode.seconds
        if token_seconds is None:
            return None
        requests = queue_of(queue)
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
