"""The tools that an answer may call, and the one constraint on it all, as a structural tag."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from pdcluster_schema.text import quoted, shortened
from pdcluster_worker.errors import field_error
from pdcluster_worker.messages.requests import MAX_CONSTRAINT_CHARACTERS, Constraint
from pdcluster_worker.server.schemas.chat_fields import Conversation, NamedToolChoice
from pdcluster_worker.server.text.reasoning import CLOSE, OPEN, Start
from pdcluster_worker.server.tools.calls import Schema, Tool, Tools
from pdcluster_worker.server.tools.registry import ParserName

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """mode: required = at least one call, named = a call of `name`.  most: calls; None = any."""

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
            raise field_error(
                "tool_choice", "there are no tools to choose from: give tools, or leave it out"
            )
        return ToolUse("none", {})
    _check_names(request)
    if choice == "none":
        return ToolUse("none", {})
    functions = [tool.function for tool in request.tools]
    tools = {
        each.name: Tool(each.name, _schema(each.parameters), bool(each.strict))
        for each in functions
    }
    if not isinstance(choice, NamedToolChoice):
        most = 1 if request.parallel_tool_calls is False else None
        return ToolUse(choice or "auto", tools, most=most)
    name = choice.function.name
    if name not in tools:
        raise field_error(
            "tool_choice.function.name",
            f"no tool is named {quoted(name)}: use one of {shortened(', '.join(tools), 200)}",
        )
    return ToolUse("named", {name: tools[name]}, name, most=1)


def _check_names(request: Conversation) -> None:
    names = [tool.function.name for tool in request.tools or ()]
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        place = names.index(name, names.index(name) + 1)
        param = f"tools[{place}].function.name"
        raise field_error(
            param, f"{name!r} names an earlier tool too: give each tool a name of its own"
        )


def _schema(parameters: dict[str, object] | None) -> dict[str, object]:
    return {"type": "object", **parameters} if parameters else NO_PARAMETERS


Format = dict[str, Any]

_GAP: Format = {"type": "regex", "pattern": r"\n{0,2}"}
"""Text between reasoning and answer, as models are used to it."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Beginning of an answer, and the tokens that it may reason for; None = any number."""

    start: Start = "answer"
    budget: int | None = None


def answer_constraint(
    constraint: Constraint | None, use: ToolUse, parser: ParserName | None, reasoning: Reasoning
) -> Constraint | None:
    """constraint: of its text.  Raises RequestError for what cannot be combined."""
    answer = _forced(use) if use.is_forced else _free(constraint, use, parser)
    has_budget = reasoning.budget is not None and reasoning.start != "answer"
    if answer is None and not has_budget:
        return None
    if reasoning.start == "answer":
        return (
            constraint
            if answer is None or answer is constraint
            else _constraint(_format_of(answer))
        )
    return _constraint(_after_reasoning(answer, reasoning))


def holds_calls(constraint: Constraint | None, use: ToolUse, parser: ParserName | None) -> bool:
    return use.mode == "auto" and parser in _MARKED and _free(constraint, use, parser) is not None


def _free(
    constraint: Constraint | None, use: ToolUse, parser: ParserName | None
) -> Constraint | Format | None:
    if use.mode != "auto":
        return constraint
    calls = _calls(use, parser)
    if constraint is not None:
        if calls is None:
            raise field_error(
                "tools",
                f"this model's calls ({parser or 'no parser'}) cannot be distinguished from "
                "an answer of a given format: "
                "set tool_choice to none or required, or leave the format out",
            )
        return {"type": "or", "elements": [calls, _format_of(constraint)]}
    if parser in _MARKED and any(tool.is_strict for tool in use.tools.values()):
        return {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"],
            "tags": [_marked_call(tool, parser) for tool in use.tools.values()],
            "stop_after_first": use.most == 1,
        }
    return None


_MARKED: tuple[ParserName, ...] = ("hermes", "qwen3_coder")
"""Parsers of calls that begin with <tool_call>, as text."""


def _calls(use: ToolUse, parser: ParserName | None) -> Format | None:
    if parser in _MARKED:
        return _row([_marked_call(tool, parser) for tool in use.tools.values()], "\n", use)
    if parser == "llama3_json":
        return _row([_whole_call(tool) for tool in use.tools.values()], "; ", use)
    return None


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _marked_call(tool: Tool, parser: ParserName | None) -> Format:
    schema = tool.parameters
    if not tool.is_strict:
        names: Schema = {name: {} for name in tool.parameters.get("properties", {})}
        schema = {"type": "object", "properties": names, "additionalProperties": True}
    if parser == "qwen3_coder":
        arguments = {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}
        begin = f"<tool_call>\n<function={tool.name}>\n"
        return _tag(begin, arguments, "\n</function>\n</tool_call>")
    begin = f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": '
    return _tag(begin, _arguments(schema), "}\n</tool_call>")


def _arguments(schema: Schema) -> Format:
    """On one line: a small model may fill its answer with white space."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def _forced(use: ToolUse) -> Format:
    if use.mode == "named":
        return _arguments(use.tools[use.name].parameters)
    calls = [
        _tag(f'{{"name": {json.dumps(name)}, "parameters": ', _arguments(tool.parameters), "}")
        for name, tool in use.tools.items()
    ]
    return _sequence(_text("["), _row(calls, ", ", use), _text("]"))


def _whole_call(tool: Tool) -> Format:
    """A call as one schema: an answer that is JSON too may begin as it does."""
    parameters = _moved(tool.parameters, "#/properties/parameters")
    schema = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return _tag("", {"type": "json_schema", "json_schema": schema}, "")


def _moved(part: Any, place: str) -> Any:
    """A schema at another place, with its references."""
    if isinstance(part, list):
        return [_moved(each, place) for each in part]
    if not isinstance(part, dict):
        return part
    moved = {name: _moved(value, place) for name, value in part.items()}
    reference = part.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = f"{place}{reference[1:]}"
    return moved


def _row(tags: list[Format], separator: str, use: ToolUse) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": use.most == 1,
    }


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": [*elements]}


def _after_reasoning(answer: Constraint | Format | None, reasoning: Reasoning) -> Format:
    limit = {} if reasoning.budget is None else {"max_tokens": reasoning.budget}
    begin = "" if reasoning.start == "inside" else OPEN
    thinking = _tag(begin, {"type": "any_text", **limit}, CLOSE)
    if reasoning.start == "before":
        thinking = {"type": "optional", "content": thinking}
    if answer is None:
        return _sequence(thinking, {"type": "any_text", "excludes": [OPEN]})
    return _sequence(thinking, _GAP, _format_of(answer))


def _format_of(constraint: Constraint | Format) -> Format:
    if not isinstance(constraint, Constraint):
        return constraint
    text = constraint.text
    match constraint.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            strict = {"strict": True} if constraint.strict else {}
            return {"type": "json_schema", "json_schema": json.loads(text), **strict}
        case "regex":
            return {"type": "regex", "pattern": text}
        case "grammar":
            return {"type": "grammar", "grammar": text}
        case "choice":
            return {"type": "or", "elements": [_text(choice) for choice in json.loads(text)]}
        case "structural_tag" | "rendered":
            return _tag_format(text)


def _tag_format(text: str) -> Format:
    try:
        found = json.loads(text).get("format")
    except (ValueError, AttributeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise field_error(
            "structured_outputs.structural_tag",
            "must be JSON of a structural tag with a format, where the model reasons or calls "
            "tools",
        )
    return found


def _constraint(form: Format) -> Constraint:
    text = json.dumps({"type": "structural_tag", "format": form}, separators=(",", ":"))
    if len(text) > MAX_CONSTRAINT_CHARACTERS:
        raise field_error(
            "tools",
            f"their schemas have {len(text)} characters as a constraint: at most "
            f"{MAX_CONSTRAINT_CHARACTERS} are accepted, send fewer tools",
        )
    return Constraint("structural_tag", text)
