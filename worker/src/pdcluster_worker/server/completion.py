"""POST /v1/completions: text or token prompts in, deltas to OpenAI's completion shapes."""

import time
from dataclasses import dataclass

from pydantic import BaseModel

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server import logprobs
from pdcluster_worker.server.choice import served
from pdcluster_worker.server.events import Delta, assembled
from pdcluster_worker.server.fields import Prompt
from pdcluster_worker.server.generation import Serving
from pdcluster_worker.server.generation_response import GenerationResponse
from pdcluster_worker.server.planning import check_servable, respond
from pdcluster_worker.server.replies import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionReply,
    CompletionUsageChunk,
    Served,
    Usage,
)
from pdcluster_worker.server.request_context import RequestContext
from pdcluster_worker.server.sampling import Wanted, check_token_ids
from pdcluster_worker.server.schemas import CompletionRequest
from pdcluster_worker.server.structured import constraint_of
from pdcluster_worker.server.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def complete(serving: Serving, request: CompletionRequest, context: RequestContext) -> GenerationResponse:
    """The answer to one completions request.  Raises RequestError when it cannot be served."""
    check_servable(request, len(request.prompt), serving)
    wanted = _wanted(request)
    prompts = await _tokenized(serving, request.prompt)
    response_id = f"cmpl-{context.request_id}"
    has_usage = bool(request.stream_options and request.stream_options.include_usage)
    shape = CompletionShape(response_id, int(time.time()), request.model, serving.tokenizer, request.logprobs is not None, has_usage)
    return respond(serving, request, wanted, prompts, shape, response_id=response_id, context=context)


def _wanted(request: CompletionRequest) -> Wanted:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError("best_of: is not supported here: leave it out or set it to the value of n", param="best_of")
    return Wanted(
        max_tokens=request.max_tokens,
        max_tokens_param="max_tokens",
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        prompt_param="prompt",
        logprobs=request.logprobs,
        constraint=constraint_of(request),
    )


async def _tokenized(serving: Serving, prompts: list[Prompt]) -> list[list[int]]:
    encoded = iter(await serving.tokenizer.encode([prompt for prompt in prompts if isinstance(prompt, str)]))
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_token_ids("prompt", prompt, serving.limits)
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """Builds text completions and their chunks."""

    response_id: str
    created: int
    model: str
    tokenizer: Tokenizer
    has_logprobs: bool
    has_usage: bool

    def chunk(self, delta: Delta) -> BaseModel | None:
        """One event; None when the token adds nothing to see."""
        if not (delta.text or delta.scored or delta.finish_reason or delta.degraded):
            return None
        choice = CompletionChunkChoice(
            index=delta.index, text=delta.text, logprobs=self._logprobs([delta]), finish_reason=delta.finish_reason
        )
        return self._chunk([choice], None, served([delta]))

    def usage_chunk(self, usage: Usage) -> BaseModel:
        """The event with the usage and no choices."""
        return self._chunk([], usage)

    def reply(self, choices: list[list[Delta]], usage: Usage) -> BaseModel:
        """The whole answer."""
        return CompletionReply(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=[self._choice(index, deltas) for index, deltas in enumerate(choices)],
            usage=usage,
            pdcluster=served([delta for deltas in choices for delta in deltas]),
        )

    def _choice(self, index: int, deltas: list[Delta]) -> CompletionChoice:
        answer = assembled(deltas)
        return CompletionChoice(index=index, text=answer.text, logprobs=self._logprobs(deltas), finish_reason=answer.finish_reason)

    def _logprobs(self, deltas: list[Delta]) -> CompletionLogprobs | None:
        if not self.has_logprobs:
            return None
        return logprobs.for_completion([scored for delta in deltas for scored in delta.scored], self.tokenizer)

    def _chunk(self, choices: list[CompletionChunkChoice], usage: Usage | None, part: Served | None = None) -> CompletionChunk:
        if self.has_usage:
            return CompletionUsageChunk(
                id=self.response_id, created=self.created, model=self.model, choices=choices, usage=usage, pdcluster=part
            )
        return CompletionChunk(id=self.response_id, created=self.created, model=self.model, choices=choices, pdcluster=part)
