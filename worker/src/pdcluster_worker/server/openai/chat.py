"""POST /v1/chat/completions: messages to a prompt, deltas to chat shapes.  Reasoning has two
names: `reasoning`, as vLLM has it, and DeepSeek's `reasoning_content`.
"""

from dataclasses import dataclass

from pydantic import BaseModel

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.requests import Constraint
from pdcluster_worker.server.generation.answer_format import answer_constraint, holds_calls
from pdcluster_worker.server.generation.chat_answer import (
    AnswerRules,
    check_tools,
    reasoning_of,
    rules_for,
)
from pdcluster_worker.server.generation.formatter import Usage
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import check_servable, respond
from pdcluster_worker.server.generation.response import GenerationResponse
from pdcluster_worker.server.generation.sampling import SamplingRequest
from pdcluster_worker.server.generation.structured import constraint_of
from pdcluster_worker.server.generation.tool_choice import tool_use
from pdcluster_worker.server.http.json_body import off_loop
from pdcluster_worker.server.http.request_context import RequestContext
from pdcluster_worker.server.openai import logprobs
from pdcluster_worker.server.openai.conversation import template_input
from pdcluster_worker.server.openai.formatter import OpenAIFormatter
from pdcluster_worker.server.openai.protocol import (
    AssistantMessage,
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
    ChatUsageChunk,
    FunctionDelta,
    ToolCallDelta,
    served,
)
from pdcluster_worker.server.openai.response_extras import ResponseExtras, extras_of
from pdcluster_worker.server.schemas.requests import ChatRequest
from pdcluster_worker.server.text.events import (
    ArgumentsDelta,
    Delta,
    Part,
    ReasoningDelta,
    ToolCallBegin,
    WholeAnswer,
    assembled,
)


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


class ChatFormatter(OpenAIFormatter):
    chunk_kinds = (ChatChunk, ChatUsageChunk)

    def __init__(self, response_id: str, request: ChatRequest, extras: ResponseExtras) -> None:
        super().__init__(response_id, request, extras)
        self._has_logprobs = bool(request.logprobs)

    def chunk(self, delta: Delta, usage: Usage | None = None) -> BaseModel | None:
        added = added_by(delta)
        if added is None:
            return None
        choice = ChatChunkChoice(
            index=delta.index,
            delta=added,
            logprobs=self._logprobs([delta]),
            finish_reason=delta.finish_reason,
            token_ids=self.extras.token_ids([delta]),
        )
        prompt_token_ids = self.extras.prompt_token_ids(0) if delta.is_first else None
        return self.new_chunk([choice], usage, served([delta]), prompt_token_ids=prompt_token_ids)

    def reply(self, choices: list[list[Delta]], usage: Usage) -> BaseModel:
        return ChatReply(
            **self.head,
            choices=[self._choice(index, deltas) for index, deltas in enumerate(choices)],
            usage=usage,
            pdcluster=served([delta for deltas in choices for delta in deltas]),
            prompt_logprobs=self.extras.of_prompt(0),
            prompt_token_ids=self.extras.prompt_token_ids(0),
        )

    def _choice(self, index: int, deltas: list[Delta]) -> ChatChoice:
        answer = assembled(deltas)
        return ChatChoice(
            index=index,
            message=message_of(answer),
            logprobs=self._logprobs(deltas),
            finish_reason=answer.finish_reason,
            token_ids=self.extras.token_ids(deltas),
        )

    def _logprobs(self, deltas: list[Delta]) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        scored = [scored for delta in deltas for scored in delta.scored]
        return logprobs.for_chat(scored, self.extras.names)


def message_of(answer: WholeAnswer) -> AssistantMessage:
    calls = [
        CalledTool(
            id=call.call_id, function=CalledFunction(name=call.name, arguments=call.arguments)
        )
        for call in answer.tool_calls
    ]
    reasoning = answer.reasoning or None
    return AssistantMessage(
        content=answer.text or (None if calls else ""),
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or None,
    )


def added_by(delta: Delta) -> ChatDelta | None:
    text = delta.text
    thoughts = [part.text for part in delta.parts if isinstance(part, ReasoningDelta)]
    reasoning = "".join(thoughts) or None
    calls = _calls(delta.parts)
    is_seen = text or reasoning or calls or delta.is_first
    if not (is_seen or delta.scored or delta.finish_reason or delta.made):
        return None
    is_bare = delta.is_first and not (reasoning or calls)
    return ChatDelta(
        role="assistant" if delta.is_first else None,
        content=text if text or is_bare else None,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or None,
    )


def _calls(parts: tuple[Part, ...]) -> list[ToolCallDelta]:
    calls: dict[int, ToolCallDelta] = {}
    for part in parts:
        if isinstance(part, ToolCallBegin):
            calls[part.call] = ToolCallDelta(
                index=part.call,
                id=part.call_id,
                type="function",
                function=FunctionDelta(name=part.name),
            )
        elif isinstance(part, ArgumentsDelta):
            known = calls.setdefault(
                part.call, ToolCallDelta(index=part.call, function=FunctionDelta())
            )
            known.function.arguments += part.text
    return list(calls.values())
