"""The answers of Anthropic's Messages API, as JSON objects."""

from typing import Any

from pdcluster_worker.server.generation.blocks import Block
from pdcluster_worker.server.generation.usage import Usage
from pdcluster_worker.server.schemas.fields import is_sendable
from pdcluster_worker.server.text.events import AnswerReason
from pdcluster_worker.server.tools.calls import object_of

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Json = dict[str, Any]


def usage_of(usage: Usage) -> Json:
    """input_tokens are those that were computed; those read from the prefix cache stand beside
    them.
    """
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def message(message_id: str, model: str, usage: Usage) -> Json:
    """A message without content, as a stream begins."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_of(usage),
    }


def ending(reason: AnswerReason, stop_string: str | None, blocks: list[Block]) -> Json:
    """Reason why the answer ended; calls that the request asked for by name count as calls here
    too.
    """
    if stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    if reason == "stop" and blocks and blocks[-1].kind == "call":
        reason = "tool_calls"
    return {"stop_reason": _REASONS[reason], "stop_sequence": None}


def started(block: Block) -> Json:
    """A block as it begins."""
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            call_id = f"toolu_{block.call_id.removeprefix('call_')}"
            return {"type": "tool_use", "id": call_id, "name": block.name, "input": {}}


def added(block: Block, text: str) -> Json:
    """Event of a delta that adds to the block."""
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def whole(block: Block) -> Json:
    """A whole block; the input of a call that was cut off by max_tokens, or that JSON cannot carry,
    is empty.
    """
    match block.kind:
        case "text":
            return started(block) | {"text": block.text}
        case "reasoning":
            return started(block) | {"thinking": block.text}
        case "call":
            return started(block) | {"input": _object(block.text)}


def _object(text: str) -> Json:
    value = object_of(text)
    return value if value is not None and is_sendable(value) else {}
