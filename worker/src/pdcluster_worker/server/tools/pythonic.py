"""Reader of calls that are written as a Python list: [get_weather(city="Paris"), add(x=1, y=2)].

Nothing is evaluated: the text is parsed, and arguments must be keywords with literal values.
"""

import ast
import warnings
from collections.abc import Sequence
from typing import Any

from pdcluster_worker.server.tools.calls import Call, Tools, all_or_none, call_with

_MARKS = ("<|python_start|>", "<|python_end|>")
_JSON_VALUES = {"true": True, "false": False, "null": None}
_MAX_CHARACTERS = 1 << 16
"""Python's parser takes about 100 bytes a character."""


def read_pythonic(text: str, tools: Tools) -> Sequence[Call] | None:
    """A whole answer that is a list of calls."""
    for mark in _MARKS:
        text = text.replace(mark, "")
    if len(text) > _MAX_CHARACTERS:
        return None
    try:
        body = _parsed(text.strip())
        if not isinstance(body, ast.List):
            return None
        return all_or_none([_call(item, tools) for item in body.elts])
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def literal_of(text: str) -> Any:
    """The value that a text is in Python, as `['a', None]`; `...`, which no call has, for any
    other text.
    """
    if len(text) > _MAX_CHARACTERS:
        return ...
    try:
        return _literal(_parsed(text))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ...


def _parsed(text: str) -> ast.expr:
    with warnings.catch_warnings(action="ignore"):  # of what a model wrote
        return ast.parse(text, mode="eval").body


def _call(item: ast.expr, tools: Tools) -> Call | None:
    if (
        not isinstance(item, ast.Call)
        or item.args
        or any(keyword.arg is None for keyword in item.keywords)
    ):
        return None
    name = ast.unparse(item.func)
    if name not in tools:
        return None
    return call_with(name, {str(keyword.arg): _literal(keyword.value) for keyword in item.keywords})


class _JsonNames(ast.NodeTransformer):
    """true, false and null, as models that learned JSON write them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Take JSON's word for Python's."""
        return ast.Constant(_JSON_VALUES[node.id]) if node.id in _JSON_VALUES else node


def _literal(value: ast.expr) -> Any:
    changed = _JsonNames().visit(value)
    assert isinstance(changed, ast.expr)
    return ast.literal_eval(changed)
