"""POST /v1/completions: text or token prompts in, deltas to OpenAI's completion shapes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import check_servable, respond
from pdcluster_worker.server.generation.response import GenerationResponse
from pdcluster_worker.server.generation.sampling import SamplingRequest, check_token_ids
from pdcluster_worker.server.generation.structured import constraint_of
from pdcluster_worker.server.generation.usage import Usage
from pdcluster_worker.server.http.off_loop import off_loop
from pdcluster_worker.server.http.request_context import RequestContext
from pdcluster_worker.server.openai import logprobs
from pdcluster_worker.server.openai.logprobs import TokenNames
from pdcluster_worker.server.openai.protocol import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionReply,
    CompletionUsageChunk,
    ServedExtension,
    served,
)
from pdcluster_worker.server.openai.response_extras import ResponseExtras
from pdcluster_worker.server.openai.writer import OpenAIWriter
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
    has_usage = bool(request.stream_options and request.stream_options.include_usage)
    shown = ResponseExtras(
        TokenNames(serving.tokenizer, as_ids=bool(request.return_tokens_as_token_ids)),
        prompts,
        request.n or 1,
        has_token_ids=bool(request.return_token_ids),
        prompt_logprobs=request.prompt_logprobs,
        echo=texts,
        echo_logprobs=request.logprobs or 0,
        hides_output=request.max_tokens == 0,
    )
    shape = CompletionShape(
        response_id, int(time.time()), request.model, shown, request.logprobs is not None, has_usage
    )
    writer = OpenAIWriter(shape, request.stream_options)
    return respond(
        serving,
        request,
        sampling_request,
        prompts,
        writer,
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


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """Builds text completions and their chunks."""

    response_id: str
    created: int
    model: str
    shown: ResponseExtras
    has_logprobs: bool
    has_usage: bool

    def chunk(self, delta: Delta, usage: Usage | None = None) -> BaseModel | None:
        """One event; None when the token adds nothing to see."""
        shown, index = self.shown, delta.index
        shown.note([delta])
        text = self._text([delta])
        if not (text or delta.scored or delta.finish_reason or delta.degraded or delta.made):
            return None
        choice = CompletionChunkChoice(
            index=index,
            text=text,
            logprobs=self._logprobs([delta]),
            finish_reason=delta.finish_reason and self._reason(delta.finish_reason),
            prompt_token_ids=shown.prompt_token_ids(index) if delta.is_first else None,
            token_ids=shown.token_ids([delta]),
        )
        return self._chunk([choice], usage and self._usage(usage), served([delta]))

    def usage_chunk(self, usage: Usage) -> BaseModel:
        """The event with the usage and no choices."""
        return self._chunk([], self._usage(usage))

    def reply(self, choices: list[list[Delta]], usage: Usage) -> BaseModel:
        """The whole answer."""
        self.shown.note([deltas[0] for deltas in choices])
        return CompletionReply(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=[self._choice(index, deltas) for index, deltas in enumerate(choices)],
            usage=self._usage(usage),
            pdcluster=served([delta for deltas in choices for delta in deltas]),
        )

    def _choice(self, index: int, deltas: list[Delta]) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=self._text(deltas),
            logprobs=self._logprobs(deltas),
            finish_reason=self._reason(assembled(deltas).finish_reason),
            prompt_logprobs=self.shown.of_prompt(index),
            prompt_token_ids=self.shown.prompt_token_ids(index),
            token_ids=self.shown.token_ids(deltas),
        )

    def _text(self, deltas: Sequence[Delta]) -> str:
        first = deltas[0]
        before = self.shown.text_before(first.index) if first.is_first else ""
        return (
            before
            if self.shown.hides_output
            else before + "".join([delta.text for delta in deltas])
        )

    def _logprobs(self, deltas: Sequence[Delta]) -> CompletionLogprobs | None:
        if not self.has_logprobs:
            return None
        shown, first = self.shown, deltas[0]
        before = shown.logprobs_before(first.index) if first.is_first else []
        made = [] if shown.hides_output else [scored for delta in deltas for scored in delta.scored]
        own = logprobs.for_completion(made, shown.names, shift=len(shown.text_before(first.index)))
        return logprobs.joined([*before, own])

    def _reason(self, reason: AnswerReason) -> AnswerReason:
        return "length" if self.shown.hides_output else reason

    def _usage(self, usage: Usage) -> Usage:
        """The client's: a token that was made to compute the prompt, and is not shown, does not
        count.
        """
        if not self.shown.hides_output:
            return usage
        return usage.with_completion(0)

    def _chunk(
        self,
        choices: list[CompletionChunkChoice],
        usage: Usage | None,
        part: ServedExtension | None = None,
    ) -> CompletionChunk:
        if self.has_usage:
            return CompletionUsageChunk(
                id=self.response_id,
                created=self.created,
                model=self.model,
                choices=choices,
                usage=usage,
                pdcluster=part,
            )
        return CompletionChunk(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=choices,
            pdcluster=part,
        )
