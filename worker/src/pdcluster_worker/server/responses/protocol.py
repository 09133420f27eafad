"""The objects of the Responses API: items, parts, and the response itself."""

from collections.abc import Sequence
from typing import Any

from pdcluster_worker.server.generation.blocks import Block
from pdcluster_worker.server.generation.formatter import Usage
from pdcluster_worker.server.openai.protocol import TokenLogprob
from pdcluster_worker.server.responses.schemas import Item, NamedTool, ResponsesRequest

Json = dict[str, Any]

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


def item_id(block: Block, request_id: str) -> str:
    return f"{_PREFIXES[block.kind]}_{request_id}{block.index}"


def item(block: Block, request_id: str, status: str, logprobs: Sequence[Json] = ()) -> Json:
    """A block as an item; in_progress: as it begins, without its content."""
    is_whole = status != "in_progress"
    made: Json = {"id": item_id(block, request_id), "status": status}
    match block.kind:
        case "text":
            return made | {
                "type": "message",
                "role": "assistant",
                "content": [part(block, logprobs)] if is_whole else [],
            }
        case "reasoning":
            content = [part(block)] if is_whole else []
            return made | {
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": None,
            }
        case "call":
            arguments = block.text if is_whole else ""
            return made | {
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": arguments,
            }


def part(block: Block, logprobs: Sequence[Json] = (), *, is_empty: bool = False) -> Json:
    text = "" if is_empty else block.text
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def logprob(entry: TokenLogprob) -> Json:
    return entry.model_dump()


def usage_of(usage: Usage) -> Json:
    details = usage.completion_tokens_details
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0 if details is None else details.reasoning_tokens
        },
        "total_tokens": usage.total_tokens,
    }


def response(request: ResponsesRequest, response_id: str, created_at: int) -> Json:
    """A response that has begun: what was asked for, and nothing made yet."""
    text = request.text
    form = None if text is None else text.format
    choice = request.tool_choice or "auto"
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": None,
        },
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {
            "format": {"type": "text"}
            if form is None
            else form.model_dump(by_alias=True, exclude_none=True)
        },
        "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice,
        "tools": [
            {"strict": None, "parameters": None, **tool.model_dump()}
            for tool in request.tools or ()
        ],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
    }


def shown_items(items: Sequence[Item], request_id: str) -> list[Json]:
    return [_shown(item, f"{request_id}i{number}") for number, item in enumerate(items)]


def _shown(item: Item, own_id: str) -> Json:
    made: Json = item.model_dump(exclude_none=True)
    made["id"] = made.get("id") or f"{'msg' if made['type'] == 'message' else 'item'}_{own_id}"
    if made["type"] == "message" and isinstance(made["content"], str):
        kind = "output_text" if made["role"] == "assistant" else "input_text"
        made["content"] = [{"type": kind, "text": made["content"]}]
    return made | {"status": "completed"}
