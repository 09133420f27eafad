"""The parsers of calls by name, and which of them a model's chat template asks for."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pdcluster_worker.config.worker import ToolParserName
from pdcluster_worker.server.text.events import CallParser
from pdcluster_worker.server.tools.call_scanner import (
    LeadingCalls,
    MarkedCalls,
    Marks,
    Values,
    json_values,
    no_values,
    parameter_values,
)
from pdcluster_worker.server.tools.calls import (
    Call,
    Tools,
    call_with,
    literal,
    object_of,
    python_expression,
    typed,
)
from pdcluster_worker.server.tools.streamed_call import Numbering, StreamedForm

_DECODER = json.JSONDecoder(strict=False)
_GAP = re.compile(r"[\s;,]*")
_NAMED = re.compile(r"\s*+([\w.:/-]++)\s*+(?:\[CALL_ID\]\s*+\w*+\s*+)?+(?:\[ARGS\])?+\s*+(?=\{)")
"""Never goes back: a model may write any amount of white space here."""
_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,256})>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>(.*?)</parameter>\s*", re.DOTALL)
_FUNCTION_END = re.compile(r"</function>\s*")

_UNREADABLE = (ValueError, TypeError, LookupError, SyntaxError, RecursionError, MemoryError)
"""Errors of the readers below, which take text that a model wrote for calls."""


def read_hermes(text: str, tools: Tools) -> list[Call]:
    return [_call(object_of(text), tools)]


def read_llama(text: str, tools: Tools) -> list[Call]:
    """A whole answer of {"name": ..., "parameters": {...}}, between semicolons or line breaks."""
    return [_call(value, tools) for value in _objects(text.replace("<|python_tag|>", "", 1))]


def read_mistral(text: str, tools: Tools) -> list[Call]:
    """Read the text after [TOOL_CALLS]: a JSON array of calls, or since v11 name[ARGS]{...}."""
    if (named := _NAMED.match(text)) is not None:
        return [_call({"name": named[1], "arguments": text[named.end() :]}, tools)]
    values = _objects(text)
    calls = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    return [_call(value, tools) for value in calls]


def _objects(text: str) -> list[Any]:
    values, position = [], _after_gap(text, 0)
    while position < len(text):
        value, position = _DECODER.raw_decode(text, position)
        values.append(value)
        position = _after_gap(text, position)
    return values


def _after_gap(text: str, position: int) -> int:
    gap = _GAP.match(text, position)
    return position if gap is None else gap.end()


def _call(value: Any, tools: Tools) -> Call:
    """From a name, and `arguments` or `parameters`, an object or the text of one."""
    name = tools[value["name"]].name
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str) and arguments:
        arguments = object_of(arguments)
    elif arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        raise TypeError("arguments are an object")
    return call_with(name, arguments)


def read_pythonic(text: str, tools: Tools) -> list[Call]:
    for mark in ("<|python_start|>", "<|python_end|>"):
        text = text.replace(mark, "")
    body = python_expression(text.strip())
    if not isinstance(body, ast.List):
        raise TypeError("calls are a list")
    return [_python_call(item, tools) for item in body.elts]


def _python_call(item: ast.expr, tools: Tools) -> Call:
    if not isinstance(item, ast.Call) or item.args or None in (each.arg for each in item.keywords):
        raise TypeError("arguments have names")
    arguments = {keyword.arg: literal(keyword.value) for keyword in item.keywords}
    return call_with(tools[ast.unparse(item.func)].name, arguments)


def read_qwen_coder(text: str, tools: Tools) -> list[Call]:
    """Read the functions of one <tool_call>, or the inside of one <function=."""
    if not text.lstrip().startswith("<function="):
        text = f"<function={text}</function>"
    return [
        call_with(name, typed(given, tools[name].parameters)) for name, given in _functions(text)
    ]


def _functions(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    position = 0
    while position < len(text):
        head = _matched(_FUNCTION, text, position)
        given: dict[str, str] = {}
        position = head.end()
        while (found := _PARAMETER.match(text, position)) is not None:
            end = found[2].find("</function>")
            if end >= 0 and found[2].find("<parameter=", end) >= 0:
                raise ValueError("a parameter that is not closed has another function in it")
            given[found[1].strip()] = found[2]
            position = found.end()
        position = _matched(_FUNCTION_END, text, position).end()
        yield head[1].strip(), given


def _matched(pattern: re.Pattern[str], text: str, position: int) -> re.Match[str]:
    found = pattern.match(text, position)
    if found is None:
        raise ValueError("no function")
    return found


ParserName = Literal["hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """marks: none = calls are the whole answer, which begins with one of `leads`.
    written: form of a call that the engine constrains, where its arguments are JSON text.
    """

    read: Callable[[str, Tools], list[Call]]
    marks: tuple[Marks, ...] = ()
    leads: tuple[str, ...] = ()
    markers: frozenset[str] = frozenset()
    values: Values = no_values
    written: StreamedForm | None = None

    def parser(
        self, tools: Tools, numbering: Numbering, *, is_constrained: bool = False
    ) -> CallParser:
        """A new parser of this form.  is_constrained: no call can have another."""

        def read(text: str) -> list[Call] | None:
            try:
                return self.read(text, tools) or None
            except _UNREADABLE:
                return None

        if not self.marks:
            return LeadingCalls(self.leads, read, numbering)
        written = self.written if is_constrained else None
        return MarkedCalls(self.marks, read, tools, numbering, values=self.values, written=written)


_TOOL_CALL = Marks("<tool_call>", "</tool_call>")

FORMS: dict[ParserName, CallFormat] = {
    "hermes": CallFormat(
        read_hermes,
        (_TOOL_CALL,),
        markers=frozenset({"<tool_call>", "</tool_call>"}),
        values=json_values,
        written=StreamedForm(
            re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)'),
            re.compile(r"\s*\}\s*</tool_call>"),
        ),
    ),
    "qwen3_coder": CallFormat(
        read_qwen_coder,
        (_TOOL_CALL, Marks("<function=", "</function>")),
        markers=frozenset({"<tool_call>", "</tool_call>"}),
        values=parameter_values,
    ),
    "mistral": CallFormat(
        read_mistral,
        (Marks("[TOOL_CALLS]"),),
        markers=frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
        values=json_values,
    ),
    "llama3_json": CallFormat(
        read_llama, leads=("{", "<|python_tag|>"), markers=frozenset({"<|python_tag|>"})
    ),
    "pythonic": CallFormat(
        read_pythonic,
        leads=("[", "<|python_start|>"),
        markers=frozenset({"<|python_start|>", "<|python_end|>"}),
    ),
}

_SIGNS: tuple[tuple[ParserName, tuple[str, ...]], ...] = (
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("pythonic", ("func_name1(",)),
)
"""Signs of the form of calls in a template: all of one line, the first line that fits."""


def parser_for(name: ToolParserName, template: str) -> ParserName | None:
    """`auto`: by the text of the model's chat template; None = unknown."""
    if name == "none":
        return None
    if name == "qwen":
        return "hermes"  # Qwen2.5 and Qwen3 write as Hermes does
    if name != "auto":
        return name
    return next((found for found, signs in _SIGNS if all(sign in template for sign in signs)), None)
