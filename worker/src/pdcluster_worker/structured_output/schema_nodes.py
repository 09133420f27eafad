"""The schemas in a schema, what its references point to, its patterns of ECMAScript, and how many
schemas llguidance makes of it, by joins and copies that it does not bound.
"""

import re
from collections.abc import Callable, Iterator
from itertools import islice, product
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


MAX_JOINED = 10_000
"""About half a second and 64 MB of compiling."""

MAX_PATTERNS = 3
"""Patterns that one string must match: whether any does takes time exponential in them."""

MAX_NAME_PATTERNS = 30
"""Patterns of names of one object, of which llguidance compares each with each."""

Resolve = Callable[[str], Any]
_CHOICES = ("anyOf", "oneOf")


def num_schemas(root: Any, resolve: Resolve) -> int:
    """Raises SchemaError where they are too many.  resolve: a reference's target."""
    counter = _Counter(resolve)
    try:
        counter.run(root)
    except RecursionError as e:
        raise SchemaError((), _TOO_MANY) from e
    return counter.num_made


_TOO_MANY = (
    f"has more than {MAX_JOINED} schemas once allOf, anyOf, oneOf and $ref are joined with what "
    "stands beside them: write fewer branches, or one schema in place of several joined ones"
)


class _Counter:
    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self.num_made = 0
        self._targets: set[int] = set()  # of references that are no part of a join, by id
        self._due: list[Any] = []

    def run(self, root: Any) -> None:
        self._due.append(root)
        while self._due:
            self.add([self._due.pop()])

    def add(self, parts: list[Any]) -> None:
        """Count what schemas that hold together become."""
        parts = [part for part in parts if isinstance(part, dict)]
        if not parts:
            return
        if len(parts) == 1 and not is_join(parts[0]):
            self._add_single(parts[0])
            return
        for joined in self._alternatives(parts):
            self._count(len(joined))
            _check_names(joined)
            if sum("pattern" in part or "format" in part for part in joined) > MAX_PATTERNS:
                raise SchemaError(
                    (), f"joins more than {MAX_PATTERNS} patterns or formats for one string"
                )
            for below in _below(joined):
                self.add(below)

    def _add_single(self, part: dict[str, Any]) -> None:
        self._count(1)
        _check_names([part])
        reference = part.get("$ref")
        if isinstance(reference, str):
            target = self._resolve(reference)
            if id(target) not in self._targets:
                self._targets.add(id(target))
                self._due.append(target)
            return
        for name in (*_CHOICES, "allOf"):
            for branch in _list(part.get(name)):
                self.add([branch])
        for below in _below([part]):
            self.add(below)

    def _count(self, number: int) -> None:
        self.num_made += number
        if self.num_made > MAX_JOINED:
            raise SchemaError((), _TOO_MANY)

    def _alternatives(self, parts: list[Any]) -> Iterator[list[dict[str, Any]]]:
        """Every choice of branches, as the flat schemas that must then hold together."""
        ways = [self._ways(part) for part in parts]
        for chosen in product(*ways):
            yield [flat for each in chosen for flat in each]

    def _ways(self, part: Any) -> list[list[dict[str, Any]]]:
        if not isinstance(part, dict):
            return [[]]
        groups = [list(self._alternatives([each])) for each in _list(part.get("allOf"))]
        groups += [
            [way for branch in _list(part[name]) for way in self._ways(branch)]
            for name in _CHOICES
            if name in part
        ]
        if isinstance(part.get("$ref"), str):
            self._count(1)
            groups.append(self._ways(self._resolve(part["$ref"])))
        ways = islice(product(*groups), MAX_JOINED)
        return [[part, *(flat for each in chosen for flat in each)] for chosen in ways]


def _check_names(joined: list[dict[str, Any]]) -> None:
    if sum(len(_map(part, "patternProperties")) for part in joined) > MAX_NAME_PATTERNS:
        raise SchemaError((), f"has more than {MAX_NAME_PATTERNS} patternProperties of one object")


# fmt: off
_RULES = frozenset(
    {
        "type", "enum", "const", "properties", "patternProperties", "additionalProperties",
        "required", "minProperties", "maxProperties", "propertyNames", "items", "prefixItems",
        "additionalItems", "minItems", "maxItems", "pattern", "format", "minLength", "maxLength",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    }
)
# fmt: on


def is_join(part: dict[str, Any]) -> bool:
    """Return whether some schemas in this one must hold together, or with what stands beside."""
    combined = [name for name in ("allOf", *_CHOICES, "$ref") if name in part]
    return bool(combined) and (
        len(combined) > 1 or len(_list(part.get("allOf"))) > 1 or not _RULES.isdisjoint(part)
    )


def _below(joined: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """For each place below these the schemas that hold there together."""
    names = dict.fromkeys(name for part in joined for name in _map(part, "properties"))
    for name in names:
        yield [
            _map(part, "properties").get(name, part.get("additionalProperties")) for part in joined
        ]
    for part in joined:
        yield from ([each] for each in _map(part, "patternProperties").values())
    yield [part.get("additionalProperties") for part in joined]
    yield [part.get("items") for part in joined]
    longest = max(len(_list(part.get("prefixItems"))) for part in joined)
    for index in range(longest):
        yield [_item(part, index) for part in joined]


def _item(part: dict[str, Any], index: int) -> Any:
    first = _list(part.get("prefixItems"))
    return first[index] if index < len(first) else part.get("items")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _map(part: dict[str, Any], name: str) -> dict[str, Any]:
    found = part.get(name)
    return found if isinstance(found, dict) else {}
