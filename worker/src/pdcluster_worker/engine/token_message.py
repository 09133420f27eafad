"""Message of the engine about one token that it has sampled."""

from pdcluster_worker.engine.ports import Sample
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.stopping import Finish
from pdcluster_worker.messages.requests import Token


def token_message(
    request: EngineRequest,
    sample: Sample,
    finish: Finish | None,
    waits: tuple[float | None, float | None],
) -> Token:
    """finish: why the request ends with it; None = it goes on.  waits: see
    `stats.FirstTokens.sample`.
    """
    return Token(
        request_id=request.request_id,
        token_id=sample.token_id,
        logprob=sample.logprob,
        top_logprobs=list(sample.top_logprobs),
        finish_reason=None if finish is None else finish.reason,
        stop_reason=None if finish is None else finish.stop_reason,
        cached_tokens=request.num_cached_tokens,
        queue_seconds=waits[0],
        prefill_seconds=waits[1],
        prompt_logprobs=list(sample.prompt_logprobs),
    )
