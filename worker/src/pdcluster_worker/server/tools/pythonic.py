"""Reader of calls that are written as a Python list: [get_weather(city="Paris"), add(x=1, y=2)].

Nothing is evaluated: the text is parsed, and arguments must be keywords with literal values.
"""

import ast
from collections.abc import Sequence

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
        tree = ast.parse(text.strip(), mode="eval")
        if not isinstance(tree.body, ast.List):
            return None
        return all_or_none([_call(item, tools) for item in tree.body.elts])
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


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
    return call_with(
        name,
        {
            str(keyword.arg): ast.literal_eval(_json_names(keyword.value))
            for keyword in item.keywords
        },
    )


class _JsonNames(ast.NodeTransformer):
    """true, false and null, as models that learned JSON write them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Take JSON's word for Python's."""
        return ast.Constant(_JSON_VALUES[node.id]) if node.id in _JSON_VALUES else node


def _json_names(value: ast.expr) -> ast.expr:
    changed = _JsonNames().visit(value)
    assert isinstance(changed, ast.expr)
    return changed
