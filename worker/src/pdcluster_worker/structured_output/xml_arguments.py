"""Arguments of a call written as XML, a tag for each: strings as they are, all else as JSON."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from pdcluster_worker.structured_output.lark import MAX_CHARACTERS, FormError, pattern, schema_rule
from pdcluster_worker.structured_output.schema_nodes import resolve

STYLES = {
    "qwen_xml": ("<parameter=", ">", "</parameter>"),
    "minimax_xml": ('<parameter name="', '">', "</parameter>"),
    "glm_xml": ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
}
"""Texts before a name, between it and the value, and after the value."""

_SPACE = r"[ \n\r\t]{0,20}"
_LINE = r"\n?"
_NAME = "[a-zA-Z_][a-zA-Z0-9_]*"
_LIMITS = ("pattern", "minLength", "maxLength")
_BRANCHES = ("anyOf", "oneOf", "allOf")
Node = dict[str, Any]
MAX_WAYS = 5_000
"""Types of all values, branch by branch: references to branches double them at each step."""


class XmlArguments:
    """The rules of a prepared schema's object.

    add: makes a rule of an expression and its attributes, and returns its name.
    """

    def __init__(self, schema: Any, style: tuple[str, str, str], add: Callable[..., str]) -> None:
        self._root: Node = schema if isinstance(schema, dict) else {}
        self._before, self._between, self._after = map(_quoted, style)
        self._end = json.dumps(style[2])
        self._add = add
        self._num_ways = 0
        self._num_characters = 0

    def rule(self) -> str:
        """The name of the rule of all arguments."""
        schema = self._resolved(self._root)
        parts = []
        for name, value in schema.get("properties", {}).items():
            part = self._argument(_quoted(name), value)
            parts.append(part if name in schema.get("required", ()) else f"({part})?")
        rest = schema.get("additionalProperties", True)
        if rest is not False:
            parts.append(f"({self._argument(_NAME, rest)})*")
        return self._add(" ".join(parts) or '""')

    def _argument(self, name: str, schema: Any) -> str:
        opening = pattern(f"{_SPACE}{self._before}{name}{self._between}")
        return f"/{opening}/ {self._value(schema)}"

    def _value(self, schema: Any) -> str:
        """The rule of a value and of the text that ends it."""
        ways = list(self._ways(schema))
        if any(_is_free(way) for way in ways):
            return self._text("(?s:.*)")
        return self._add(" | ".join(self._way(way) for way in ways))

    def _way(self, way: Node) -> str:
        if "enum" in way:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in way["enum"]]
            listed = "|".join(map(_quoted, texts))
            return f"/{pattern(f'{_LINE}(?:{listed}){self._close}')}/"
        if way.get("type") == "string":
            return self._text(_body(way))
        shared = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        rule = schema_rule({**shared, **way})
        self._num_characters += len(rule)
        if self._num_characters > MAX_CHARACTERS:
            raise FormError("has arguments whose schemas are too long with the $defs of each")
        return f"/{_SPACE}/ {rule} /{pattern(self._close)}/"

    @property
    def _close(self) -> str:
        return f"{_SPACE}{self._after}"

    def _text(self, body: str) -> str:
        """A text with a line break before and after it or not, which goes up to its end tag."""
        return self._add(f"/{pattern(f'{_LINE}{body}{_LINE}')}/", f"[suffix={self._end}]")

    def _ways(self, schema: Any) -> Iterator[Node]:
        """The schemas, each of one type, of which a value fits one."""
        self._num_ways += 1
        if self._num_ways > MAX_WAYS:
            raise FormError(f"has arguments with more than {MAX_WAYS} branches in all")
        schema = self._resolved(schema)
        branches = next((schema[name] for name in _BRANCHES if name in schema), None)
        if branches and "type" not in schema:
            for branch in branches:
                yield from self._ways(branch)
        elif "const" in schema:
            yield {"enum": [schema["const"]]}
        elif isinstance(schema.get("type"), list) and "enum" not in schema:
            yield from ({**schema, "type": kind} for kind in schema["type"])
        else:
            yield schema

    def _resolved(self, schema: Any) -> Node:
        for _ in range(64):
            if not isinstance(schema, dict):
                return {}
            if "$ref" not in schema:
                break
            schema = resolve(self._root, schema["$ref"])[1]
        return dict(schema)


def _is_free(way: Node) -> bool:
    if "type" in way:
        return way["type"] == "string" and not any(name in way for name in ("enum", *_LIMITS))
    return "enum" not in way and "properties" not in way and "items" not in way


def _body(way: Node) -> str:
    if "pattern" in way:
        return f"(?:{way['pattern'].removeprefix('^').removesuffix('$')})"
    return f"(?s:.{{{way.get('minLength', 0)},{way.get('maxLength', '')}}})"


def _quoted(text: str) -> str:
    return re.sub(r"[^\w<>= ]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)
