"""Deltas as chat completions and their chunks.  Reasoning goes under two names: `reasoning`, as
vLLM has it, and DeepSeek's `reasoning_content`.
"""

from pydantic import BaseModel

from pdcluster_worker.server.generation.formatter import Usage
from pdcluster_worker.server.openai import logprobs
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
from pdcluster_worker.server.openai.response_extras import ResponseExtras
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


class ChatFormatter(OpenAIFormatter):
    chunk_kinds = (ChatChunk, ChatUsageChunk)

    def __init__(self, response_id: str, request: ChatRequest, extras: ResponseExtras) -> None:
        super().__init__(response_id, request, extras)
        self._has_logprobs = bool(request.logprobs)

    def chunk(self, delta: Delta, usage: Usage | None = None) -> BaseModel | None:
        added = _added_by(delta)
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
            message=_message_of(answer),
            logprobs=self._logprobs(deltas),
            finish_reason=answer.finish_reason,
            token_ids=self.extras.token_ids(deltas),
        )

    def _logprobs(self, deltas: list[Delta]) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        scored = [scored for delta in deltas for scored in delta.scored]
        return logprobs.for_chat(scored, self.extras.names)


def _message_of(answer: WholeAnswer) -> AssistantMessage:
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


def _added_by(delta: Delta) -> ChatDelta | None:
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
