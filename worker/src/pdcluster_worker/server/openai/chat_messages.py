"""The parts of an answer as messages and deltas of OpenAI's chat API.

Reasoning goes under two names: `reasoning`, which vLLM has now, and
`reasoning_content`, which DeepSeek began with and many clients read.
"""

from pdcluster_worker.server.openai.protocol import (
    AssistantMessage,
    CalledFunction,
    CalledTool,
    ChatDelta,
    FunctionDelta,
    ToolCallDelta,
)
from pdcluster_worker.server.text.events import (
    ArgumentsDelta,
    Delta,
    Part,
    ReasoningDelta,
    ToolCallBegin,
    WholeAnswer,
)


def message_of(answer: WholeAnswer) -> AssistantMessage:
    """The message of one whole choice."""
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
    """Visible part that one event adds; None when it adds none."""
    text = delta.text
    reasoning = (
        "".join([part.text for part in delta.parts if isinstance(part, ReasoningDelta)]) or None
    )
    calls = _calls(delta.parts)
    if not (
        text
        or reasoning
        or calls
        or delta.is_first
        or delta.scored
        or delta.finish_reason
        or delta.made
    ):
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
    """One entry for each call that the parts touch, as clients join them by index."""
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
