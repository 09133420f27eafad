"""A conversation of items as a chat request."""

from collections.abc import Iterator, Sequence
from typing import Any

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.responses.schemas import (
    LOGPROBS,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    NamedTool,
    Part,
    ReasoningItem,
    RefusalPart,
    ResponsesRequest,
    ResponsesTool,
    TextFormat,
)
from pdcluster_worker.server.schemas.requests import ChatRequest, Names, checked_chat

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stream",
    "parallel_tool_calls",
    "priority",
    "cache_salt",
    "pdcluster",
)

NAMES = Names(
    {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    },
    {".function": ""},
)
"""Chat's fields -> those that a client of this API knows."""


def items_of(request: ResponsesRequest) -> list[Item]:
    if isinstance(request.input, str):
        return [MessageItem(role="user", content=request.input)]
    return list(request.input)


def chat_of(request: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    fields |= {"model": request.model, "messages": list(_messages(request.instructions, items))}
    fields["max_completion_tokens"] = request.max_output_tokens
    if LOGPROBS in (request.include or ()):
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.tools:
        fields["tools"] = [_tool(tool) for tool in request.tools]
    choice = request.tool_choice
    named = (
        {"type": "function", "function": {"name": choice.name}}
        if isinstance(choice, NamedTool)
        else choice
    )
    fields["tool_choice"] = named
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        fields["response_format"] = _format(request.text.format)
    with NAMES.in_errors():
        return checked_chat(fields)


def _messages(instructions: str | None, items: Sequence[Item]) -> Iterator[dict[str, Any]]:
    if instructions:
        yield {"role": "system", "content": instructions}
    turn: dict[str, Any] = {}  # of the assistant, as far as it has come
    for item in items:
        if isinstance(item, MessageItem) and item.role == "assistant":
            if turn.get("content") or turn.get("tool_calls"):
                yield _whole(turn)
                turn = {}
            turn["content"] = _text(item.content)
        elif isinstance(item, FunctionCallItem):
            call = {
                "id": item.call_id,
                "type": "function",
                "function": {"name": item.name, "arguments": item.arguments},
            }
            turn.setdefault("tool_calls", []).append(call)
        elif isinstance(item, ReasoningItem):
            if turn:
                yield _whole(turn)
            turn = {"reasoning_content": _text(item.content or item.summary or [])}
        else:
            if turn:
                yield _whole(turn)
                turn = {}
            yield _other(item)
    if turn:
        yield _whole(turn)


def _whole(turn: dict[str, Any]) -> dict[str, Any]:
    content = turn.get("content") or (None if turn.get("tool_calls") else "")
    return {"role": "assistant", **turn, "content": content}


def _other(item: MessageItem | FunctionCallOutputItem) -> dict[str, Any]:
    if isinstance(item, FunctionCallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    return {"role": item.role, "content": _text(item.content)}


def _text(content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        part.refusal if isinstance(part, RefusalPart) else part.text for part in content
    )


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _format(text_format: TextFormat) -> dict[str, Any]:
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    if text_format.schema_ is None:
        raise RequestError(
            "text.format.schema: is required with type json_schema", param="text.format.schema"
        )
    schema = {
        "name": text_format.name or "answer",
        "schema": text_format.schema_,
        "strict": text_format.strict,
    }
    return {
        "type": "json_schema",
        "json_schema": {**schema, "description": text_format.description},
    }
