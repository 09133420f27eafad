"""A conversation of items as a chat request."""

from collections.abc import Iterator, Sequence
from typing import Any

from pdcluster_worker.errors import field_error
from pdcluster_worker.server.responses.schemas import (
    LOGPROBS,
    FunctionCallItem,
    FunctionCallOutputItem,
    ImagePart,
    Item,
    MessageItem,
    NamedTool,
    ReasoningItem,
    RefusalPart,
    ResponsesRequest,
    ShownPart,
    TextFormat,
)
from pdcluster_worker.server.schemas.fields import image_part, text_part
from pdcluster_worker.server.schemas.requests import (
    ChatRequest,
    Names,
    Sampling,
    checked_chat,
    function_of,
)

_SAME = (*Sampling.model_fields, "seed", "stop", "parallel_tool_calls")

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
        fields["tools"] = [
            function_of(**tool.model_dump(exclude={"type"})) for tool in request.tools
        ]
    choice = request.tool_choice
    fields["tool_choice"] = (
        function_of(name=choice.name) if isinstance(choice, NamedTool) else choice
    )
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
        is_of_turn = isinstance(item, FunctionCallItem) or (
            isinstance(item, MessageItem)
            and item.role == "assistant"
            and not (turn.get("content") or turn.get("tool_calls"))
        )
        if turn and not is_of_turn:
            yield _whole(turn)
            turn = {}
        match item:
            case FunctionCallItem():
                call = function_of(name=item.name, arguments=item.arguments)
                turn.setdefault("tool_calls", []).append({"id": item.call_id, **call})
            case MessageItem(role="assistant"):
                turn["content"] = _text(item.content)
            case ReasoningItem():
                turn["reasoning_content"] = _text(item.content or item.summary or [])
            case MessageItem():
                yield {"role": item.role, "content": _shown(item.content)}
            case FunctionCallOutputItem():
                output = _shown(item.output)
                yield {"role": "tool", "tool_call_id": item.call_id, "content": output}
    if turn:
        yield _whole(turn)


def _whole(turn: dict[str, Any]) -> dict[str, Any]:
    content = turn.get("content") or (None if turn.get("tool_calls") else "")
    return {"role": "assistant", **turn, "content": content}


def _shown(content: str | list[ShownPart]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        image_part(part.image_url) if isinstance(part, ImagePart) else text_part(_text_of(part))
        for part in content
    ]


def _text(content: str | Sequence[ShownPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(map(_text_of, content))


def _text_of(part: ShownPart) -> str:
    match part:
        case ImagePart():
            fix = "images belong to role user, and to outputs of calls"
            raise field_error("input", f"a message of role assistant has an image: {fix}")
        case RefusalPart():
            return part.refusal
        case _:
            return part.text


def _format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema_ is None:
        raise field_error("text.format.schema", "is required with type json_schema")
    schema = {**form.model_dump(by_alias=True, exclude={"type"}), "name": form.name or "answer"}
    return {"type": "json_schema", "json_schema": schema}
