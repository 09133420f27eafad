"""The schemas in a schema, what its references point to, and its patterns of ECMAScript."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from pdcluster_worker.structured_output.lark import FormError

Node = dict[str, Any]
Pointer = tuple[str | int, ...]
NO_ANCHORS: dict[str, tuple[Pointer, Any]] = {}

MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLES = ("items", "additionalProperties", "additionalItems")


class SchemaError(FormError):
    """A schema that cannot be enforced; the message begins with its place, a JSON pointer."""

    def __init__(self, place: Pointer, reason: str) -> None:
        super().__init__(f"{pointer(place)}: {reason}")


def pointer(place: Pointer) -> str:
    """A place as a JSON pointer.

    >>> pointer(("properties", "a/b", "anyOf", 0))
    '#/properties/a~1b/anyOf/0'
    """
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in place)
    return "/".join(("#", *parts))


def children(place: Pointer, node: Node) -> Iterator[tuple[Pointer, Any]]:
    """The schemas directly in one, with their places.  Raises SchemaError for what is none."""
    for name in MAPS:
        if name in node:
            if not isinstance(node[name], dict):
                raise SchemaError((*place, name), "must be an object whose values are schemas")
            yield from (
                ((*place, name, key), value)
                for key, value in node[name].items()
                if name in ("properties", "patternProperties") or isinstance(value, dict)
            )
    for name in LISTS:
        if name in node and (
            not isinstance(node[name], list) or (not node[name] and name != "prefixItems")
        ):
            raise SchemaError((*place, name), "must be a list of schemas that is not empty")
    for name in (*LISTS, *SINGLES):
        if isinstance(node.get(name), list):
            yield from (((*place, name, index), each) for index, each in enumerate(node[name]))
        elif name in node:
            yield (*place, name), node[name]


def nodes(part: Any, place: Pointer = ()) -> Iterator[tuple[Pointer, Node]]:
    """A schema and all in it that are objects."""
    due = [(place, part)]
    while due:
        place, part = due.pop()
        if isinstance(part, dict):
            yield place, part
            due += children(place, part)


def anchors_of(root: Any) -> dict[str, tuple[Pointer, Any]]:
    """The schemas that have a name, by the reference to it."""
    return {
        reference: (place, node)
        for place, node in nodes(root)
        for reference in (f"#{node.get('$anchor', '')}", node.get("$id"))
        if isinstance(reference, str)
    }


def resolve(
    root: Any, reference: Any, anchors: dict[str, tuple[Pointer, Any]] = NO_ANCHORS
) -> tuple[Pointer, Any]:
    """The place that a reference points to, and what is there.  Raises ValueError."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise ValueError("must point into this schema, as #/$defs/name does: others are not read")
    if reference in ("#", "#/"):
        return (), root
    if reference[1] != "/":
        if reference not in anchors:
            raise ValueError(f"{reference!r} is nowhere in the schema")
        return anchors[reference]
    found: list[str | int] = []
    part = root
    for written in reference[2:].split("/"):
        key = unquote(written).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and key.isdecimal() and int(key) < len(part):
            found.append(int(key))
            part = part[int(key)]
        elif isinstance(part, dict) and key in part:
            found.append(key)
            part = part[key]
        else:
            raise ValueError(f"{reference!r} is nowhere in the schema")
    return tuple(found), part


_ESCAPE = re.compile(r"\\(u\{|0(?!\d)|c[A-Za-z]|.)", re.DOTALL)
_PIECE = re.compile(r"\[\^?(?:\\.|[^\]\\])*\]|\\c[A-Za-z]|\\u\{|\\.|\(\?<?[=!]|.", re.DOTALL)
_AROUND = re.compile(r"\(\?<?[=!]")


def looks_around(pattern: str) -> bool:
    """Return whether a pattern has a lookahead or lookbehind."""
    return any(_AROUND.match(piece[0]) for piece in _PIECE.finditer(pattern))


def of_rust(pattern: str) -> str:
    r"""A pattern of ECMAScript as Rust's regular expressions take it: without lookarounds, and
    with escapes of theirs.

    >>> of_rust(r"(?!a)\u{a}\cJ[^]")
    '\\x{a}\\x{a}(?s:.)'
    """
    pieces = [found[0] for found in _PIECE.finditer(pattern)]
    depth, made = 0, []
    for piece in pieces:
        if depth:
            depth += (piece[0] == "(") - (piece == ")")
        elif _AROUND.match(piece):
            depth = 1
        else:
            made.append("(?s:.)" if piece == "[^]" else _ESCAPE.sub(_escaped, piece))
    return "".join(made)


def _escaped(found: re.Match[str]) -> str:
    if found[1] == "u{":
        return r"\x{"
    if found[1] == "0":
        return r"\x00"
    return rf"\x{{{ord(found[1][1]) % 32:x}}}" if len(found[1]) == 2 else found[0]
