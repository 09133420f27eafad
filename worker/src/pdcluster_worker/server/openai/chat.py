"""POST /v1/chat/completions: messages to a prompt, deltas to OpenAI's chat shapes."""

import time
from dataclasses import dataclass

from pydantic import BaseModel

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
from pdcluster_worker.server.generation.usage import Usage
from pdcluster_worker.server.http.off_loop import off_loop
from pdcluster_worker.server.http.request_context import RequestContext
from pdcluster_worker.server.openai import logprobs
from pdcluster_worker.server.openai.chat_messages import added_by, message_of
from pdcluster_worker.server.openai.conversation import template_input
from pdcluster_worker.server.openai.logprobs import TokenNames
from pdcluster_worker.server.openai.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    ChatUsageChunk,
    ServedExtension,
    served,
)
from pdcluster_worker.server.openai.response_extras import ResponseExtras
from pdcluster_worker.server.openai.writer import OpenAIWriter
from pdcluster_worker.server.schemas.requests import ChatRequest
from pdcluster_worker.server.text.events import Delta, assembled


async def complete(
    serving: ServingContext, request: ChatRequest, context: RequestContext
) -> GenerationResponse:
    """The answer to one chat request.  Raises RequestError when it cannot be served."""
    check_servable(request, 1, serving)
    prepared = await off_loop(context.num_body_bytes, prepare, serving, request)
    response_id = f"chatcmpl-{context.request_id}"
    has_usage = bool(request.stream_options and request.stream_options.include_usage)
    shown = ResponseExtras(
        TokenNames(serving.tokenizer, as_ids=bool(request.return_tokens_as_token_ids)),
        [prepared.prompt],
        request.n or 1,
        has_token_ids=bool(request.return_token_ids),
        prompt_logprobs=request.prompt_logprobs,
    )
    shape = ChatShape(
        response_id, int(time.time()), request.model, shown, bool(request.logprobs), has_usage
    )
    writer, rules = OpenAIWriter(shape, request.stream_options), prepared.rules
    prompts, sampling_request = [prepared.prompt], prepared.sampling_request
    return respond(
        serving,
        request,
        sampling_request,
        prompts,
        writer,
        response_id=response_id,
        context=context,
        rules=rules,
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


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Builds chat completions and their chunks."""

    response_id: str
    created: int
    model: str
    shown: ResponseExtras
    has_logprobs: bool
    has_usage: bool

    def chunk(self, delta: Delta, usage: Usage | None = None) -> BaseModel | None:
        """One event; None when the token adds nothing to see."""
        added = added_by(delta)
        if added is None:
            return None
        choice = ChatChunkChoice(
            index=delta.index,
            delta=added,
            logprobs=self._logprobs([delta]),
            finish_reason=delta.finish_reason,
            token_ids=self.shown.token_ids([delta]),
        )
        chunk = self._chunk([choice], usage, served([delta]))
        chunk.prompt_token_ids = self.shown.prompt_token_ids(0) if delta.is_first else None
        return chunk

    def usage_chunk(self, usage: Usage) -> BaseModel:
        """The event with the usage and no choices."""
        return self._chunk([], usage)

    def reply(self, choices: list[list[Delta]], usage: Usage) -> BaseModel:
        """The whole answer."""
        self.shown.note([deltas[0] for deltas in choices])
        return ChatReply(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=[self._choice(index, deltas) for index, deltas in enumerate(choices)],
            usage=usage,
            pdcluster=served([delta for deltas in choices for delta in deltas]),
            prompt_logprobs=self.shown.of_prompt(0),
            prompt_token_ids=self.shown.prompt_token_ids(0),
        )

    def _choice(self, index: int, deltas: list[Delta]) -> ChatChoice:
        answer = assembled(deltas)
        return ChatChoice(
            index=index,
            message=message_of(answer),
            logprobs=self._logprobs(deltas),
            finish_reason=answer.finish_reason,
            token_ids=self.shown.token_ids(deltas),
        )

    def _logprobs(self, deltas: list[Delta]) -> ChatLogprobs | None:
        if not self.has_logprobs:
            return None
        return logprobs.for_chat(
            [scored for delta in deltas for scored in delta.scored], self.shown.names
        )

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | None,
        part: ServedExtension | None = None,
    ) -> ChatChunk:
        if self.has_usage:
            return ChatUsageChunk(
                id=self.response_id,
                created=self.created,
                model=self.model,
                choices=choices,
                usage=usage,
                pdcluster=part,
            )
        return ChatChunk(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=choices,
            pdcluster=part,
        )
