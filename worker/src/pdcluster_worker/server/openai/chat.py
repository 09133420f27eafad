"""POST /v1/chat/completions: deltas to chat shapes.  Reasoning has two names: `reasoning`, as vLLM
has it, and DeepSeek's `reasoning_content`.
"""

from collections.abc import Sequence

from pdcluster_worker.server.generation.formatter import Json
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import GenerationResponse, check_servable, respond
from pdcluster_worker.server.http.json_body import off_loop
from pdcluster_worker.server.http.request_context import RequestContext
from pdcluster_worker.server.openai import logprobs
from pdcluster_worker.server.openai.conversation import prepare
from pdcluster_worker.server.openai.formatter import (
    OpenAIFormatter,
    ResponseExtras,
    extras_of,
    present,
)
from pdcluster_worker.server.openai.protocol import ChatReply
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
    formatter = ChatFormatter(
        response_id, request, extras_of(request, serving.tokenizer, prepared.prompts)
    )
    return respond(serving, request, prepared, formatter, response_id=response_id, context=context)


class ChatFormatter(OpenAIFormatter):
    reply_kind = ChatReply
    reply_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, response_id: str, request: ChatRequest, extras: ResponseExtras) -> None:
        super().__init__(response_id, request, extras)
        self._has_logprobs = bool(request.logprobs)

    def choice(self, deltas: Sequence[Delta], *, is_whole: bool) -> Json | None:
        if is_whole:
            content: Json = {"message": message_of(assembled(deltas))}
        elif (added := added_by(deltas[0])) is not None:
            content = {"delta": added}
        else:
            return None
        return {
            "index": deltas[0].index,
            **content,
            "logprobs": self._logprobs(deltas),
            "finish_reason": deltas[-1].finish_reason,
            **present(token_ids=self.extras.token_ids(deltas)),
        }

    def _logprobs(self, deltas: Sequence[Delta]) -> Json | None:
        if not self._has_logprobs:
            return None
        scored = [scored for delta in deltas for scored in delta.scored]
        return {"content": logprobs.for_chat(scored, self.extras.names), "refusal": None}

    def of_prompts(self, *, is_first: bool, is_whole: bool) -> Json:
        return present(
            prompt_logprobs=self.extras.of_prompt(0) if is_whole else None,
            prompt_token_ids=self.extras.prompt_token_ids(0) if is_first else None,
        )


def message_of(answer: WholeAnswer) -> Json:
    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in answer.tool_calls
    ]
    reasoning = answer.reasoning or None
    return {
        "role": "assistant",
        "content": answer.text or (None if calls else ""),
        "refusal": None,
        **present(reasoning=reasoning, reasoning_content=reasoning, tool_calls=calls or None),
    }


def added_by(delta: Delta) -> Json | None:
    text = delta.text
    thoughts = [part.text for part in delta.parts if isinstance(part, ReasoningDelta)]
    reasoning = "".join(thoughts) or None
    calls = _calls(delta.parts)
    is_seen = text or reasoning or calls or delta.is_first
    if not (is_seen or delta.scored or delta.finish_reason or delta.made):
        return None
    is_bare = delta.is_first and not (reasoning or calls)
    return present(
        role="assistant" if delta.is_first else None,
        content=text if text or is_bare else None,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or None,
    )


def _calls(parts: Sequence[Part]) -> list[Json]:
    """A call's id and name come in its first chunk, the arguments in pieces."""
    calls: dict[int, Json] = {}
    for part in parts:
        if isinstance(part, ToolCallBegin):
            calls[part.call] = {
                "index": part.call,
                "id": part.call_id,
                "type": "function",
                "function": {"name": part.name, "arguments": ""},
            }
        elif isinstance(part, ArgumentsDelta):
            further = {"index": part.call, "function": {"arguments": ""}}
            calls.setdefault(part.call, further)["function"]["arguments"] += part.text
    return list(calls.values())
