"""Refuse requests that can never run here, with a message that names the limit and the fix."""

from pdcluster_worker.engine.block_table import ceil_div, too_large
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.requests import TransferTarget


def refusal(request: EngineRequest, settings: EngineSettings, num_more: int) -> str | None:
    """Reason why it can never run; num_more: tokens beyond the known ones that need room."""
    num_tokens = request.num_tokens
    if num_tokens == 0:
        return "the prompt is empty: send at least one token"
    if num_tokens >= settings.max_model_len:
        return (
            f"{num_tokens} tokens leave no room for output within "
            f"max_model_len={settings.max_model_len}: shorten the prompt"
        )
    if request.num_output_tokens >= request.sampling.max_tokens:
        return (
            f"max_tokens={request.sampling.max_tokens} are made already: nothing is left to "
            "generate"
        )
    if (
        request.target is not None
        and (reason := _target_refusal(num_tokens, request.target, settings)) is not None
    ):
        return reason
    return too_large(num_tokens + num_more, settings)


def _target_refusal(
    num_tokens: int, target: TransferTarget, settings: EngineSettings
) -> str | None:
    num_cached, num_blocks = target.cached_tokens, len(target.block_ids)
    block_size = settings.block_size
    if num_cached % block_size or not 0 <= num_cached < num_tokens:
        return (
            f"target.cached_tokens={num_cached} is not a multiple of {block_size} below the "
            f"request's {num_tokens} tokens"
        )
    expected = ceil_div(num_tokens, block_size) - num_cached // block_size
    if num_blocks != expected:
        return f"target.block_ids has {num_blocks} blocks, the request needs {expected}"
    if num_blocks > settings.num_blocks:  # what is sent stays held until then, whatever the window
        return (
            f"target.block_ids has {num_blocks} blocks, and there are {settings.num_blocks} here: "
            "raise engine.kvCacheMemory"
        )
    return None
