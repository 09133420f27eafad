"""Ends of a request by its own tokens; stop strings are found by the server, which then aborts."""

from dataclasses import dataclass

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import FinishReason


@dataclass(frozen=True, slots=True)
class Finish:
    """Reason why a request ended; stop_reason: the stop token id that ended it, if one did."""

    reason: FinishReason
    stop_reason: int | None = None


def check_stop(request: EngineRequest, max_model_len: int) -> Finish | None:
    """Return the end that the last token causes: end of sequence, then stop ids (neither before
    min_tokens), then length.
    """
    sampling, last = request.sampling, request.tokens[-1]
    is_heeded = not sampling.ignore_eos and request.num_output_tokens >= sampling.min_tokens
    # Under a constraint it is sampled too early, or though ignored, only where nothing else can
    # follow.
    if last in sampling.eos_token_ids and (is_heeded or sampling.constraint is not None):
        return Finish("stop")
    if last in sampling.stop_token_ids and request.num_output_tokens >= sampling.min_tokens:
        return Finish("stop", stop_reason=last)
    if ends_by_length(request, max_model_len, num_more=0):
        return Finish("length")
    return None


def ends_by_length(request: EngineRequest, max_model_len: int, num_more: int) -> bool:
    """Return whether the request is at its length limit once it has `num_more` further tokens,
    whatever they are.
    """
    num_tokens = len(request.tokens) + num_more
    # What a peer goes on with ends by the peer's length, which its max_tokens keeps to.
    is_full = request.target is None and num_tokens >= max_model_len
    return is_full or num_tokens - request.num_prompt_tokens >= request.sampling.max_tokens
