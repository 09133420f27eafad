"""A request of the Messages API as a chat request: a turn of blocks may be several messages."""

import json
import re
from collections.abc import Iterator
from typing import Any

from pdcluster_worker.errors import RequestError, field_error
from pdcluster_worker.server.anthropic.schemas import (
    ImageBlock,
    InputMessage,
    MessagesPrompt,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from pdcluster_worker.server.schemas.fields import image_part, text_part
from pdcluster_worker.server.schemas.requests import (
    ChatRequest,
    Names,
    Sampling,
    checked_chat,
    function_of,
)

_MISTRAL_ID = re.compile("toolu_[A-Za-z0-9]{9}")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAMPLING = ("max_tokens", *Sampling.model_fields)

NAMES = Names(
    {
        "messages": "messages",
        "continue_final_message": "messages",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "thinking_token_budget": "thinking.budget_tokens",
    },
    {".function.parameters": ".input_schema", ".function": ""},
)
"""Chat's fields and those of this API; messages of chat are others, and more."""


def chat_of(request: MessagesPrompt, *, reasons: bool) -> ChatRequest:
    """reasons: the model is known to think, so that a budget for it counts."""
    fields: dict[str, Any] = {"model": request.model, **_conversation(request)}
    if request.tools:
        fields["tools"] = [
            function_of(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            )
            for tool in request.tools
        ]
        fields |= _choice(request.tool_choice)
    if request.thinking is not None:
        fields |= _thinking(request, reasons=reasons)
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "answer", "schema": request.output_config.format.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request, MessagesRequest):
        fields |= {name: getattr(request, name) for name in _SAMPLING}
        fields["stop"] = request.stop_sequences
    with NAMES.in_errors():
        return checked_chat(fields)


def _conversation(request: MessagesPrompt) -> dict[str, Any]:
    """A final message of the assistant begins the answer; an empty one begins nothing."""
    messages = list(_messages(request))
    if request.messages[-1].role != "assistant":
        return {"messages": messages}
    last = messages[-1]
    fault = _fault_of_begun(request, last)
    if fault is not None:
        raise field_error(f"messages[{len(request.messages) - 1}].content", fault)
    if last["content"]:
        return {"messages": messages, "continue_final_message": True}
    return {"messages": messages[:-1]} if len(messages) > 1 else {"messages": messages}


def _fault_of_begun(request: MessagesPrompt, last: dict[str, Any]) -> str | None:
    text = last["content"] or ""
    if "tool_calls" in last:
        return (
            "tool_use blocks need tool_result blocks after them: add a user message that has one "
            "for each"
        )
    if "reasoning_content" in last and not text:
        return (
            "the final block in an assistant message cannot be thinking: add its text, or leave "
            "the message out"
        )
    if text != text.rstrip():
        return "final assistant content cannot end with trailing whitespace: take it away"
    if text and request.output_config is not None and request.output_config.format is not None:
        return (
            "an answer that is begun cannot be held to output_config.format: leave out either of "
            "the two"
        )
    return None


def _messages(request: MessagesPrompt) -> Iterator[dict[str, Any]]:
    if request.system:
        yield {"role": "system", "content": _text(request.system)}
    for number, message in enumerate(request.messages):
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(message, f"messages[{number}]")
        else:
            yield from _user(message, f"messages[{number}]")


def _assistant(message: InputMessage, path: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(message.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                call = function_of(name=block.name, arguments=arguments)
                calls.append({"id": _id(block.id), **call})
            case ToolResultBlock() | ImageBlock():
                raise _misplaced(path, place, block.type, "user")
    made: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(texts) or (None if calls else ""),
    }
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    return made | ({"tool_calls": calls} if calls else {})


def _user(message: InputMessage, path: str) -> Iterator[dict[str, Any]]:
    parts = []
    for place, block in enumerate(message.content):
        match block:
            case ToolResultBlock():
                content = _result(block)
                yield {"role": "tool", "tool_call_id": _id(block.tool_use_id), "content": content}
            case TextBlock() | ImageBlock():
                parts.append(_part(block))
            case ToolUseBlock():
                raise _misplaced(path, place, "tool_use", "assistant")
            case _:
                raise _misplaced(path, place, "thinking", "assistant")
    if parts or not message.content:
        yield {"role": message.role, "content": parts}


def _result(block: ToolResultBlock) -> str | list[dict[str, Any]]:
    content, error = block.content or "", "Error: " if block.is_error else ""
    if isinstance(content, str):
        return error + content
    parts = [_part(part) for part in content]
    if parts[0]["type"] == "text":
        return [text_part(error + parts[0]["text"]), *parts[1:]]
    return [text_part(error), *parts] if error else parts


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, ImageBlock):
        return image_part(block.source.image_url)
    return text_part(block.text)


def _id(given: str) -> str:
    # Mistral's templates take ids alone that their model wrote
    return given.removeprefix("toolu_") if _MISTRAL_ID.fullmatch(given) else given


def _misplaced(path: str, place: int, kind: str, role: str) -> RequestError:
    param = f"{path}.content[{place}]"
    return field_error(param, f"a block of type {kind} belongs to role {role}")


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    chosen: dict[str, Any] = (
        {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    )
    if choice.type != "tool":
        return chosen | {"tool_choice": _CHOICES[choice.type]}
    if choice.name is None:
        raise field_error("tool_choice.name", "is required with type tool")
    return chosen | {"tool_choice": function_of(name=choice.name)}


def _thinking(request: MessagesPrompt, *, reasons: bool) -> dict[str, Any]:
    assert request.thinking is not None
    thinking = request.thinking
    is_on = thinking.type != "disabled"
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise field_error("thinking.budget_tokens", "is required with type enabled")
    if isinstance(request, MessagesRequest) and (thinking.budget_tokens or 0) >= request.max_tokens:
        raise field_error(
            "thinking.budget_tokens",
            f"must be less than max_tokens={request.max_tokens}, which counts thinking too",
        )
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": is_on, "thinking": is_on}}
    if reasons and is_on:
        fields["thinking_token_budget"] = thinking.budget_tokens
    return fields
