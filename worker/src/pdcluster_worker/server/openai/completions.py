"""POST /v1/chat/completions and /v1/completions: deltas to their shapes."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdcluster_worker.server.generation.formatter import Json, Usage
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import check_servable, respond
from pdcluster_worker.server.http.limits import BodyReader
from pdcluster_worker.server.http.request_context import context_of
from pdcluster_worker.server.http.routes import JsonRoute, with_errors
from pdcluster_worker.server.openai import protocol
from pdcluster_worker.server.openai.formatter import (
    OpenAIFormatter,
    ResponseExtras,
    extras_of,
    present,
)
from pdcluster_worker.server.openai.protocol import ChatReply, CompletionReply
from pdcluster_worker.server.schemas.requests import ChatRequest, CompletionRequest
from pdcluster_worker.server.text.events import (
    ArgumentsDelta,
    Delta,
    Part,
    ReasoningDelta,
    ToolCallBegin,
    WholeAnswer,
    assembled,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def completion_routes(serving: ServingContext, reader: BodyReader) -> list[Route]:
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        check_servable(body, 1, serving)
        context = context_of(request)
        prepared = await serving.front_end.chat(serving, body, context.num_body_bytes)
        response_id = f"chatcmpl-{context.request_id}"
        extras = extras_of(body, serving.tokenizer, prepared.prompts)
        formatter = ChatFormatter(response_id, body, extras)
        return respond(serving, body, prepared, formatter, response_id=response_id, context=context)

    async def completions(body: CompletionRequest, request: Request) -> Response:
        check_servable(body, len(body.prompt), serving)
        context = context_of(request)
        num_bytes = context.num_body_bytes
        prepared, texts = await serving.front_end.completion(serving, body, num_bytes)
        response_id = f"cmpl-{context.request_id}"
        extras = extras_of(
            body,
            serving.tokenizer,
            prepared.prompts,
            echo=texts,
            echo_logprobs=body.logprobs or 0,
            hides_output=body.max_tokens == 0,
        )
        formatter = CompletionFormatter(response_id, body, extras)
        return respond(serving, body, prepared, formatter, response_id=response_id, context=context)

    return [
        JsonRoute(
            path,
            kind,
            handle,
            with_errors(reply),
            reader=reader,
            others=serving.others,
            streams=True,
        )
        for path, kind, handle, reply in (
            (CHAT, ChatRequest, chat_completions, ChatReply),
            (COMPLETIONS, CompletionRequest, completions, CompletionReply),
        )
    ]


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
        return {"content": protocol.chat_logprobs(scored, self.extras.names), "refusal": None}

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
    reasoning = answer.reasoning or None  # by the names that vLLM and DeepSeek give it
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
        own = protocol.completion_rows(made, extras.names, shift) if not extras.hides_output else []
        before = extras.logprobs_before(first.index) if first.is_first else []
        return protocol.completion_logprobs([*before, *own])
