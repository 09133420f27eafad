"""POST /v1/completions: text or token prompts in, deltas to OpenAI's completion shapes."""

from collections.abc import Sequence

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.generation.choice import rules_of
from pdcluster_worker.server.generation.formatter import Json, Usage
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import (
    GenerationResponse,
    Prepared,
    check_servable,
    respond,
)
from pdcluster_worker.server.generation.sampling import SamplingRequest, check_token_ids
from pdcluster_worker.server.http.json_body import off_loop
from pdcluster_worker.server.http.request_context import RequestContext
from pdcluster_worker.server.openai import logprobs
from pdcluster_worker.server.openai.formatter import (
    OpenAIFormatter,
    ResponseExtras,
    extras_of,
    present,
)
from pdcluster_worker.server.openai.protocol import CompletionReply
from pdcluster_worker.server.schemas.requests import CompletionRequest
from pdcluster_worker.server.schemas.structured import constraint_of
from pdcluster_worker.server.text.events import Delta

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def complete(
    serving: ServingContext, request: CompletionRequest, context: RequestContext
) -> GenerationResponse:
    """The answer to one completions request.  Raises RequestError when it cannot be served."""
    check_servable(request, len(request.prompt), serving)
    prepared, texts = await off_loop(context.num_body_bytes, _prepared, serving, request)
    response_id = f"cmpl-{context.request_id}"
    extras = extras_of(
        request,
        serving.tokenizer,
        prepared.prompts,
        echo=texts,
        echo_logprobs=request.logprobs or 0,
        hides_output=request.max_tokens == 0,
    )
    formatter = CompletionFormatter(response_id, request, extras)
    return respond(serving, request, prepared, formatter, response_id=response_id, context=context)


def _prepared(serving: ServingContext, request: CompletionRequest) -> tuple[Prepared, list[str]]:
    """Also the prompts' texts where they are to be echoed.

    Takes long for a large request: see `off_loop`.
    """
    sampling_request, tokenizer = _sampling_request(request), serving.tokenizer
    rules = rules_of(request, sampling_request.prompt_logprobs)
    for prompt in request.prompt:
        if not isinstance(prompt, str):
            check_token_ids("prompt", prompt, serving.limits)
    encoded = iter(tokenizer.encode([text for text in request.prompt if isinstance(text, str)]))
    prompts = [next(encoded) if isinstance(given, str) else given for given in request.prompt]
    echoed = request.prompt if request.echo else []
    texts = [given if isinstance(given, str) else tokenizer.decode(given) for given in echoed]
    return Prepared(prompts, sampling_request, rules), texts


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


class CompletionFormatter(OpenAIFormatter):
    reply_kind = CompletionReply
    reply_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, response_id: str, request: CompletionRequest, extras: ResponseExtras
    ) -> None:
        super().__init__(response_id, request, extras)
        self._has_logprobs = request.logprobs is not None

    def choice(self, deltas: Sequence[Delta], *, is_whole: bool) -> Json | None:
        extras, first, reason = self.extras, deltas[0], deltas[-1].finish_reason
        index, before = first.index, extras.text_before(first.index) if first.is_first else ""
        text = before + ("" if extras.hides_output else "".join(delta.text for delta in deltas))
        if not (text or first.scored or reason or first.degraded or first.made or is_whole):
            return None
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(deltas) if self._has_logprobs else None,
            "finish_reason": "length" if reason and extras.hides_output else reason,
            **present(
                prompt_logprobs=extras.of_prompt(index) if is_whole else None,
                prompt_token_ids=extras.prompt_token_ids(index) if first.is_first else None,
                token_ids=extras.token_ids(deltas),
            ),
        }

    def shown_usage(self, usage: Usage) -> Usage:
        # a token made to compute the prompt, and not shown, does not count
        return usage.with_completion(0) if self.extras.hides_output else usage

    def _logprobs(self, deltas: Sequence[Delta]) -> Json:
        extras, first = self.extras, deltas[0]
        shift = len(extras.text_before(first.index))
        made = [scored for delta in deltas for scored in delta.scored]
        own = logprobs.completion_rows(made, extras.names, shift) if not extras.hides_output else []
        before = extras.logprobs_before(first.index) if first.is_first else []
        return logprobs.for_completion([*before, *own])
