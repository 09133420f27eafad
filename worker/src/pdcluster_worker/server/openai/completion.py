"""POST /v1/completions: text or token prompts in, deltas to OpenAI's completion shapes."""

from collections.abc import Sequence

from pydantic import BaseModel

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.generation.formatter import Usage
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import check_servable, respond
from pdcluster_worker.server.generation.response import GenerationResponse
from pdcluster_worker.server.generation.sampling import SamplingRequest, check_token_ids
from pdcluster_worker.server.generation.structured import constraint_of
from pdcluster_worker.server.http.json_body import off_loop
from pdcluster_worker.server.http.request_context import RequestContext
from pdcluster_worker.server.openai import logprobs
from pdcluster_worker.server.openai.formatter import OpenAIFormatter
from pdcluster_worker.server.openai.protocol import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionReply,
    CompletionUsageChunk,
    served,
)
from pdcluster_worker.server.openai.response_extras import ResponseExtras, extras_of
from pdcluster_worker.server.schemas.fields import Prompt
from pdcluster_worker.server.schemas.requests import CompletionRequest
from pdcluster_worker.server.text.events import AnswerReason, Delta, assembled

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def complete(
    serving: ServingContext, request: CompletionRequest, context: RequestContext
) -> GenerationResponse:
    """The answer to one completions request.  Raises RequestError when it cannot be served."""
    check_servable(request, len(request.prompt), serving)
    sampling_request, prompts, texts = await off_loop(
        context.num_body_bytes, _prepared, serving, request
    )
    response_id = f"cmpl-{context.request_id}"
    extras = extras_of(
        request,
        serving.tokenizer,
        prompts,
        echo=texts,
        echo_logprobs=request.logprobs or 0,
        hides_output=request.max_tokens == 0,
    )
    return respond(
        serving,
        request,
        sampling_request,
        prompts,
        CompletionFormatter(response_id, request, extras),
        response_id=response_id,
        context=context,
    )


def _prepared(
    serving: ServingContext, request: CompletionRequest
) -> tuple[SamplingRequest, list[list[int]], list[str]]:
    """Wanted fields, the prompts' tokens, and the prompts' texts where they are to be echoed.

    Takes long for a large request: see `off_loop`.
    """
    sampling_request = _sampling_request(request)
    prompts = _tokenized(serving, request.prompt)
    texts = [_text(serving, prompt) for prompt in request.prompt] if request.echo else []
    return sampling_request, prompts, texts


def _sampling_request(request: CompletionRequest) -> SamplingRequest:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError(
            "best_of: is not supported here: leave it out or set it to the value of n",
            param="best_of",
        )
    scored = [request.prompt_logprobs, request.logprobs if request.echo else None]
    counts = [count for count in scored if count is not None]
    if request.max_tokens == 0 and not (request.echo or counts):
        message = (
            "max_tokens: must be greater than or equal to 1, or 0 together with echo=true or "
            "prompt_logprobs"
        )
        raise RequestError(message, param="max_tokens")
    return SamplingRequest(
        max_tokens=None if request.max_tokens is None else max(1, request.max_tokens),
        max_tokens_param="max_tokens",
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        prompt_param="prompt",
        logprobs=request.logprobs,
        prompt_logprobs=max(counts, default=None),
        constraint=constraint_of(request),
    )


def _text(serving: ServingContext, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else serving.tokenizer.decode(prompt)


def _tokenized(serving: ServingContext, prompts: list[Prompt]) -> list[list[int]]:
    encoded = iter(
        serving.tokenizer.encode([prompt for prompt in prompts if isinstance(prompt, str)])
    )
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_token_ids("prompt", prompt, serving.limits)
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]


class CompletionFormatter(OpenAIFormatter):
    chunk_kinds = (CompletionChunk, CompletionUsageChunk)

    def __init__(
        self, response_id: str, request: CompletionRequest, extras: ResponseExtras
    ) -> None:
        super().__init__(response_id, request, extras)
        self._has_logprobs = request.logprobs is not None

    def chunk(self, delta: Delta, usage: Usage | None = None) -> BaseModel | None:
        extras, index = self.extras, delta.index
        extras.note([delta])
        text = self._text([delta])
        if not (text or delta.scored or delta.finish_reason or delta.degraded or delta.made):
            return None
        choice = CompletionChunkChoice(
            index=index,
            text=text,
            logprobs=self._logprobs([delta]),
            finish_reason=delta.finish_reason and self._reason(delta.finish_reason),
            prompt_token_ids=extras.prompt_token_ids(index) if delta.is_first else None,
            token_ids=extras.token_ids([delta]),
        )
        return self.new_chunk([choice], usage, served([delta]))

    def reply(self, choices: list[list[Delta]], usage: Usage) -> BaseModel:
        return CompletionReply(
            **self.head,
            choices=[self._choice(index, deltas) for index, deltas in enumerate(choices)],
            usage=usage,
            pdcluster=served([delta for deltas in choices for delta in deltas]),
        )

    def shown_usage(self, usage: Usage) -> Usage:
        # a token made to compute the prompt, and not shown, does not count
        return usage.with_completion(0) if self.extras.hides_output else usage

    def _choice(self, index: int, deltas: list[Delta]) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=self._text(deltas),
            logprobs=self._logprobs(deltas),
            finish_reason=self._reason(assembled(deltas).finish_reason),
            prompt_logprobs=self.extras.of_prompt(index),
            prompt_token_ids=self.extras.prompt_token_ids(index),
            token_ids=self.extras.token_ids(deltas),
        )

    def _text(self, deltas: Sequence[Delta]) -> str:
        first = deltas[0]
        before = self.extras.text_before(first.index) if first.is_first else ""
        return (
            before
            if self.extras.hides_output
            else before + "".join([delta.text for delta in deltas])
        )

    def _logprobs(self, deltas: Sequence[Delta]) -> CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        extras, first = self.extras, deltas[0]
        before = extras.logprobs_before(first.index) if first.is_first else []
        made = [scored for delta in deltas for scored in delta.scored]
        shift = len(extras.text_before(first.index))
        own = logprobs.for_completion([] if extras.hides_output else made, extras.names, shift)
        return logprobs.joined([*before, own])

    def _reason(self, reason: AnswerReason) -> AnswerReason:
        return "length" if self.extras.hides_output else reason
