"""Schemas with `anyOf`, `oneOf`, `allOf` or `$ref` beside other keywords, as ones that xgrammar
follows whole: it takes the first of these and passes over the rest.

Such a schema becomes an `anyOf` of flat ones: what stands beside is joined with each
branch of `anyOf` and `oneOf`, and with all schemas of `allOf` (`intersection`).  Where
branches multiply beyond bounds, those of one keyword are left out.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from pdcluster_worker.structured_output.intersection import (
    Node,
    Pointer,
    intersection,
    is_within,
    type_of,
    types_of,
)

MOST_BRANCHES = 100
"""Branches of one schema once they are multiplied out."""

MOST_JOINED = 4_000
"""Schemas that are looked at for joining, and properties in all branches that are made, for one
text: each takes xgrammar a millisecond or two.
"""

_COMBINATORS = ("$ref", "allOf", "anyOf", "oneOf")
_MAPS = ("properties", "patternProperties")
_BRANCHES = ("anyOf", "oneOf", "allOf")
_SINGLES = (
    *("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"),
    "propertyNames",
)

LeaveOut = Callable[[Pointer, str, str], None]
"""Called before something is left out, with the place, the combinator, and why it cannot be joined.
"""


class Combining:
    """One text, whose references have the form #/$defs/NAME, or # alone.

    places:      of schemas in what was sent, by their id.
    definitions: the joined ones, and those that a joined schema which refers to itself needs.
    """

    def __init__(
        self, root: Any, sources: Node, places: dict[int, Pointer], leave_out: LeaveOut
    ) -> None:
        self._root = root
        self._sources = sources
        self._places = places
        self._leave_out = leave_out
        self._left = MOST_JOINED
        self._done: dict[str, Any] = {}
        self._under_way: dict[str, str | None] = {}  # to its name, once it was referred to
        self._flat: dict[tuple[int, frozenset[str]], list[Node]] = {}
        self._kept: list[Node] = []  # whose ids are in use
        self._place: Pointer = ()  # of what is joined
        self.definitions: Node = {}

    def run(self) -> Any:
        """The root; a schema that nothing fits is False."""
        made = self._part(self._root)
        for name, part in self._sources.items():
            self.definitions[name] = self._part(part)
        return made

    def _part(self, part: Any) -> Any:
        """One schema and all within it."""
        if isinstance(part, bool):
            return part
        if not self._must_be_joined(part):
            return self._inside(part)
        key = json.dumps(part, sort_keys=True)
        if key in self._done:
            return self._again(key)
        if key in self._under_way:
            name = self._under_way[key] or self._new_name()
            self._under_way[key] = name
            return _reference(name)
        self._under_way[key] = None
        made = self._joined(part)
        name_used = self._under_way.pop(key)
        if name_used is not None:
            self.definitions[name_used] = made
            made = _reference(name_used)
        self._done[key] = made
        return made

    def _again(self, key: str) -> Any:
        """Schema that was joined before, as a definition: copies of copies would multiply."""
        made = self._done[key]
        if isinstance(made, dict) and "$ref" not in made:
            name = self._new_name()
            self.definitions[name] = made
            self._done[key] = _reference(name)
        return self._done[key]

    def _new_name(self) -> str:
        name = f"j{len(self.definitions)}"
        self.definitions[name] = True
        return name

    def _must_be_joined(self, part: Node) -> bool:
        found = [name for name in _COMBINATORS if name in part]
        siblings = set(part) - set(found)
        if siblings == {"type"} and len(found) == 1 and found != ["allOf"]:
            return not self._is_of_types(part, types_of(part) or [], set())
        return bool(found) and (len(found) > 1 or bool(siblings) or len(part.get("allOf", ())) > 1)

    def _is_of_types(self, part: Any, types: list[str], seen: set[str]) -> bool:
        """Return whether branches and reference are certain to be of these types, whatever stands
        beside.
        """
        if isinstance(part, bool):
            return part is False
        within = [branch for name in ("anyOf", "oneOf") for branch in part.get(name, ())]
        if "$ref" in part:
            within = [] if part["$ref"] in seen else [self._target(part["$ref"])]
            seen.add(part["$ref"])
            return all(self._is_of_types(target, types, seen) for target in within)
        if within:
            return all(self._is_of_types(branch, types, seen) for branch in within)
        values = part["enum"] if "enum" in part else [part["const"]] if "const" in part else None
        kinds = types_of(part) if values is None else [type_of(value) for value in values]
        return kinds is not None and all(is_within(kind, types) for kind in kinds)

    def _target(self, reference: str) -> Any:
        return self._root if reference == "#" else self._sources[reference.removeprefix("#/$defs/")]

    def _joined(self, part: Node) -> Any:
        outer = self._place
        self._place = self._places.get(id(part), outer)
        try:
            made = [self._inside(each) for each in self._alternatives(part, frozenset())]
        finally:
            self._place = outer
        possible = [each for each in made if each is not False]
        if not possible:
            return False
        return possible[0] if len(possible) == 1 else {"anyOf": possible}

    def _alternatives(self, part: Any, within: frozenset[str]) -> list[Node]:
        """Flat schemas of which one has to hold.  within: references that are being followed."""
        if isinstance(part, bool):
            return [{}] if part else []
        key = id(part), within
        if key not in self._flat:
            self._kept.append(part)
            self._left -= 1
            self._flat[key] = self._flattened(part, within)
        return self._flat[key]

    def _flattened(self, part: Node, within: frozenset[str]) -> list[Node]:
        own = {name: value for name, value in part.items() if name not in _COMBINATORS}
        rest = own.pop("unevaluatedProperties", None)
        found, is_whole = [own], True
        groups = sorted(self._groups(part, within), key=lambda group: len(group[1]))
        for combinator, group in groups:
            joined = self._product(found, group, combinator)
            if joined is None:
                is_whole = False
            elif joined or combinator != "$ref":
                found = joined
            else:
                found = group  # in older drafts nothing counts beside it
        if rest is not None:
            name = "additionalProperties" if groups else "unevaluatedProperties"
            found = [{name: rest, **each} for each in found]
        return found if is_whole else [{"additionalProperties": True, **each} for each in found]

    def _groups(self, part: Node, within: frozenset[str]) -> Iterator[tuple[str, list[Node]]]:
        if "$ref" in part:
            reference = part["$ref"]
            if reference in within or self._left <= 0:
                why = "the branches are too many"
                if reference in within:
                    why = "the reference leads back to itself"
                self._leave_out(self._place, "$ref", why)
            else:
                target = self._target(reference)
                yield "$ref", self._alternatives(target, within | {reference})
        for branch in part.get("allOf", ()):
            yield "allOf", self._alternatives(branch, within)
        for name in ("anyOf", "oneOf"):
            if name in part:
                branches = part[name] if name == "anyOf" else _exclusive(part[name])
                yield (
                    name,
                    [each for branch in branches for each in self._alternatives(branch, within)],
                )

    def _product(self, found: list[Node], group: list[Node], combinator: str) -> list[Node] | None:
        """Each of the ones with each of the others; None where they are too many."""
        size = sum(len(each.get("properties", ())) for each in (*found, *group)) * max(
            len(found), len(group)
        )
        if len(found) * len(group) > MOST_BRANCHES or size > self._left:
            self._leave_out(self._place, combinator, "the branches are too many")
            return None
        self._left -= size

        def report(keyword: str) -> None:
            self._leave_out(
                self._place, combinator, f"two schemas that must hold together have {keyword}"
            )

        return [
            made
            for one in found
            for other in group
            if (made := intersection(one, other, report)) is not None
        ]

    def _inside(self, part: Node) -> Any:
        """A schema with nothing to join at its top; False where something that it needs has no
        value that fits.
        """
        made = dict(part)
        for name in _MAPS:
            if name in part:
                made[name] = {key: self._part(value) for key, value in part[name].items()}
        for name in (*_BRANCHES, "prefixItems"):
            if name in part:
                made[name] = [self._part(each) for each in part[name]]
        for name in _SINGLES:
            if name in part:
                made[name] = self._part(part[name])
        return _without_impossible(made)


def _reference(name: str) -> Node:
    return {"$ref": f"#/$defs/{name}"}


def _without_impossible(made: Node) -> Any:
    """Leave out properties and branches that no value fits; False where one of them is needed."""
    for name in _BRANCHES:
        branches = [each for each in made.get(name, ()) if each is not False]
        if name in made and (not branches or (name == "allOf" and branches != made[name])):
            return False
        if name in made:
            made[name] = branches
    properties = made.get("properties", {})
    possible = {name: value for name, value in properties.items() if value is not False}
    if len(possible) < len(properties):
        if set(made.get("required", ())) & (set(properties) - set(possible)):
            return False
        made["properties"] = possible
        if "patternProperties" not in made:
            rest = made.get("additionalProperties", True)
            unnamed = [name for name in made.get("required", ()) if name not in possible]
            made["properties"] = possible | dict.fromkeys(unnamed, rest)
            made["additionalProperties"] = False  # or it could come as one of the others
    return made


def _exclusive(branches: list[Any]) -> list[Any]:
    """Branches of `oneOf` that are lists of required names alone, each without the one name more
    that another asks for.
    """
    if not all(isinstance(branch, dict) and set(branch) == {"required"} for branch in branches):
        return branches
    made: list[Any] = []
    for place, branch in enumerate(branches):
        missing = [
            set(other["required"]) - set(branch["required"])
            for other in (*branches[:place], *branches[place + 1 :])
        ]
        if all(missing):
            absent = {name: False for names in missing if len(names) == 1 for name in names}
            made.append({**branch, "properties": absent})
    return made
