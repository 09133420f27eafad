"""Readers of calls as models write them: as JSON (Hermes, Qwen, Llama, Mistral), as a Python list,
and in Qwen3-Coder's elements.
"""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pdcluster_worker.server.tools.calls import (
    Call,
    Tools,
    all_or_none,
    call_of,
    call_with,
    object_of,
)
from pdcluster_worker.server.tools.typed import (
    MAX_PYTHON_CHARACTERS,
    literal,
    python_expression,
    typed,
)

_DECODER = json.JSONDecoder(strict=False)
_GAP = re.compile(r"[\s;,]*")
_NAMED = re.compile(r"\s*+([\w.:/-]++)\s*+(?:\[CALL_ID\]\s*+\w*+\s*+)?+(?:\[ARGS\])?+\s*+(?=\{)")
"""Never goes back: a model may write any amount of white space here."""


def read_hermes(text: str, tools: Tools) -> Sequence[Call] | None:
    call = call_of(object_of(text), tools)
    return None if call is None else [call]


def read_llama(text: str, tools: Tools) -> Sequence[Call] | None:
    """A whole answer of {"name": ..., "parameters": {...}}, between semicolons or line breaks."""
    values = _objects(text.replace("<|python_tag|>", "", 1))
    return None if values is None else all_or_none([call_of(value, tools) for value in values])


def read_mistral(text: str, tools: Tools) -> Sequence[Call] | None:
    """Read the text after [TOOL_CALLS]: a JSON array of calls, or since v11 name[ARGS]{...}."""
    if (named := _NAMED.match(text)) is not None:
        call = call_of({"name": named[1], "arguments": text[named.end() :]}, tools)
        return None if call is None else [call]
    values = _objects(text)
    if values is None:
        return None
    calls = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    return all_or_none([call_of(value, tools) for value in calls])


def _objects(text: str) -> list[Any] | None:
    values, position = [], _after_gap(text, 0)
    while position < len(text):
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        values.append(value)
        position = _after_gap(text, position)
    return values


def _after_gap(text: str, position: int) -> int:
    gap = _GAP.match(text, position)
    return position if gap is None else gap.end()


_MARKS = ("<|python_start|>", "<|python_end|>")


def read_pythonic(text: str, tools: Tools) -> Sequence[Call] | None:
    for mark in _MARKS:
        text = text.replace(mark, "")
    if len(text) > MAX_PYTHON_CHARACTERS:
        return None
    try:
        body = python_expression(text.strip())
        if not isinstance(body, ast.List):
            return None
        return all_or_none([_python_call(item, tools) for item in body.elts])
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(item: ast.expr, tools: Tools) -> Call | None:
    if (
        not isinstance(item, ast.Call)
        or item.args
        or any(keyword.arg is None for keyword in item.keywords)
    ):
        return None
    name = ast.unparse(item.func)
    if name not in tools:
        return None
    return call_with(name, {str(keyword.arg): literal(keyword.value) for keyword in item.keywords})


_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,256})>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>(.*?)</parameter>\s*", re.DOTALL)
_FUNCTION_END = re.compile(r"</function>\s*")

Written = tuple[str, dict[str, str]]
"""A function's name, and its parameters as text."""


def read_qwen_coder(text: str, tools: Tools) -> Sequence[Call] | None:
    """The functions of one <tool_call>, or the inside of one <function=; anything else makes it no
    call.
    """
    if not text.lstrip().startswith("<function="):
        text = f"<function={text}</function>"
    return all_or_none([_coder_call(written, tools) for written in _functions(text)])


def _functions(text: str) -> Iterator[Written | None]:
    position = 0
    while position < len(text):
        head = _FUNCTION.match(text, position)
        if head is None:
            yield None
            return
        given: dict[str, str] = {}
        position = head.end()
        while (found := _PARAMETER.match(text, position)) is not None:
            if _is_unclosed(found[2]):
                yield None
                return
            given[found[1].strip()] = found[2]
            position = found.end()
        end = _FUNCTION_END.match(text, position)
        if end is None:
            yield None
            return
        yield head[1].strip(), given
        position = end.end()


def _is_unclosed(value: str) -> bool:
    """Return whether a value has another function's parameter in it, since it was never closed."""
    end = value.find("</function>")
    return end >= 0 and value.find("<parameter=", end) >= 0


def _coder_call(written: Written | None, tools: Tools) -> Call | None:
    tool = None if written is None else tools.get(written[0])
    if written is None or tool is None:
        return None
    return call_with(tool.name, typed(written[1], tool.parameters))
