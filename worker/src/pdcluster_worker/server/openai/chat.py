"""POST /v1/chat/completions: messages to a prompt, and how the answer is read."""

from dataclasses import dataclass

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.constraint import Constraint
from pdcluster_worker.server.generation.answer_format import answer_constraint, holds_calls
from pdcluster_worker.server.generation.chat_answer import (
    AnswerRules,
    check_tools,
    reasoning_of,
    rules_for,
)
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import check_servable, respond
from pdcluster_worker.server.generation.response import GenerationResponse
from pdcluster_worker.server.generation.sampling import SamplingRequest
from pdcluster_worker.server.generation.structured import constraint_of
from pdcluster_worker.server.generation.tool_choice import tool_use
from pdcluster_worker.server.http.off_loop import off_loop
from pdcluster_worker.server.http.request_context import RequestContext
from pdcluster_worker.server.openai.chat_formatter import ChatFormatter
from pdcluster_worker.server.openai.conversation import template_input
from pdcluster_worker.server.openai.response_extras import extras_of
from pdcluster_worker.server.schemas.requests import ChatRequest


async def complete(
    serving: ServingContext, request: ChatRequest, context: RequestContext
) -> GenerationResponse:
    """The answer to one chat request.  Raises RequestError when it cannot be served."""
    check_servable(request, 1, serving)
    prepared = await off_loop(context.num_body_bytes, prepare, serving, request)
    response_id = f"chatcmpl-{context.request_id}"
    extras = extras_of(request, serving.tokenizer, [prepared.prompt])
    return respond(
        serving,
        request,
        prepared.sampling_request,
        [prepared.prompt],
        ChatFormatter(response_id, request, extras),
        response_id=response_id,
        context=context,
        rules=prepared.rules,
    )


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat request that is ready to run: its prompt's tokens, what is wanted, and how the answer
    is read.
    """

    prompt: list[int]
    sampling_request: SamplingRequest
    rules: AnswerRules


def prepare(serving: ServingContext, request: ChatRequest) -> PreparedChat:
    """Render and check a chat request; other APIs come this way too.  Raises RequestError.

    Takes long for a large request: see `off_loop`.
    """
    use, parsers = tool_use(request), serving.parsers
    check_tools(use, parsers)
    constraint = constraint_of(request)
    prompt = serving.tokenizer.encode_chat(template_input(request, shows_tools=use.mode != "none"))
    reasoning = reasoning_of(request, parsers, prompt.text)
    sampling_request = _sampling_request(
        request, answer_constraint(constraint, use, parsers.tools, reasoning)
    )
    # A stop string may cut a call off, whose text is shown then.
    holds = holds_calls(constraint, use, parsers.tools) and not request.stop
    rules = rules_for(request, use, parsers, reasoning, holds_calls=holds)
    return PreparedChat(prompt.token_ids, sampling_request, rules)


def _sampling_request(request: ChatRequest, constraint: Constraint | None) -> SamplingRequest:
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs: is allowed only with logprobs=true", param="top_logprobs")
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return SamplingRequest(
        max_tokens=getattr(request, param),
        max_tokens_param=param,
        default_max_tokens=None,
        prompt_param="messages",
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        constraint=constraint,
    )
