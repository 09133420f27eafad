"""Tools that an answer may or must call.  Raises RequestError naming the field."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from pdcluster_schema.text import quoted, shortened
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.schemas.chat_fields import Conversation, NamedToolChoice
from pdcluster_worker.server.tools.calls import Tool, Tools

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """mode: required = at least one call, named = a call of `name`.  most: calls; None = any
    number.
    """

    mode: Literal["none", "auto", "required", "named"]
    tools: Tools
    name: str = ""
    most: int | None = None

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")


def tool_use(request: Conversation) -> ToolUse:
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice: there are no tools to choose from: give tools, or leave it out",
                param="tool_choice",
            )
        return ToolUse("none", {})
    _check_names(request)
    if choice == "none":
        return ToolUse("none", {})
    tools = {
        tool.function.name: Tool(
            tool.function.name, _schema(tool.function.parameters), bool(tool.function.strict)
        )
        for tool in request.tools
    }
    if isinstance(choice, NamedToolChoice):
        return _named(choice.function.name, tools)
    return ToolUse(
        choice or "auto", tools, most=1 if request.parallel_tool_calls is False else None
    )


def _named(name: str, tools: Tools) -> ToolUse:
    if name not in tools:
        raise RequestError(
            f"tool_choice.function.name: no tool is named {quoted(name)}: use one of "
            f"{shortened(', '.join(tools), 200)}",
            param="tool_choice.function.name",
        )
    return ToolUse("named", {name: tools[name]}, name, most=1)


def _check_names(request: Conversation) -> None:
    names = [tool.function.name for tool in request.tools or ()]
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        place = names.index(name, names.index(name) + 1)
        param = f"tools[{place}].function.name"
        raise RequestError(
            f"{param}: {name!r} names an earlier tool too: give each tool a name of its own",
            param=param,
        )


def _schema(parameters: dict[str, object] | None) -> dict[str, object]:
    return {"type": "object", **parameters} if parameters else NO_PARAMETERS
