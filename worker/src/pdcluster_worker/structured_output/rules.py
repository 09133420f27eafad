"""Rules of a grammar, as xgrammar writes them, in a form that compiles in less time and memory.

xgrammar makes states for each rule and looks at the whole vocabulary for each state.
It writes the same rules again for every property and every schema of a structural
tag, and a string of bounded length takes it a state for each character.  So equal
rules become one, and all bounded strings share one chain: what may follow when so
many characters are left.  The language stays the same.  Pure.
"""

import re
from collections.abc import Iterator

MOST_CHAINED = 128
"""Longest bound that the chain takes, of about 8 ms a character over a vocabulary of 50,000; beyond
it xgrammar counts, which takes it two seconds for each length and longer for a mask.
"""

MOST_ROUNDS = 200
"""Rounds in which rules may turn out to differ: as many as rules alike lie within one another."""

_PLAIN = r"[^\0-\x1f\"\\]"
"""A character that a string has as it is: JSON holds no control characters."""

_HEAD = re.compile(r"\n(?=[\w.\-]+(?:\[[^\]\n]*\])? ::= )")
_COUNTED = r"(([^\"\\\r\n]))"
"""Body that xgrammar gives a character of a string whose length it counts."""

_BOUNDED = re.compile(r'"\\"" ([\w.\-]+)\{(\d+), (-?\d+)\} "\\""')
_TOKEN = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|(?P<name>[A-Za-z_][\w.\-]*)'
    r"(?P<optional>\{0, -?\d+\})?|(?P<mark>[()|])"
)
_ROOT = "root"

Rules = dict[str, str]
"""Bodies by name."""


def rules_of(text: str) -> Rules:
    """The rules of a grammar, in their order."""
    parts = (part.partition(" ::= ") for part in _HEAD.split(text.strip()))
    return {name: body for name, _, body in parts}


def text_of(rules: Rules) -> str:
    """The grammar of these rules."""
    return "".join(f"{name} ::= {body}\n" for name, body in rules.items())


def simplified(text: str) -> str:
    """A grammar of the same language that is quicker to compile."""
    rules = rules_of(text)
    chain = _chained(rules)
    return text_of(_merged(chain | rules, chain))


def _chained(rules: Rules) -> Rules:
    """Write strings of bounded length by the chain, where the bounds are small; returns the rules
    of the chain.
    """
    counted = {name for name, body in rules.items() if body == _COUNTED}
    prefix = "plain"
    while any(name.startswith(prefix) for name in rules):
        prefix += "_"
    ends: set[tuple[int, int]] = set()

    def written(found: re.Match[str]) -> str:
        least, most = int(found[2]), int(found[3])
        if found[1] not in counted or max(least, most) > MOST_CHAINED:
            return found[0]
        ends.add((least, most))
        return f'"\\"" {_link(prefix, least, most)}'

    for name, body in rules.items() if counted else ():
        rules[name] = f"(({_PLAIN}))" if name in counted else _BOUNDED.sub(written, body)
    return _chain(prefix, {link for least, most in ends for link in _below(least, most)})


def _link(prefix: str, least: int, most: int) -> str:
    return f"{prefix}_{least}_{'any' if most < 0 else most}"


def _next(least: int, most: int) -> tuple[int, int]:
    return max(0, least - 1), most if most < 0 else most - 1


def _below(least: int, most: int) -> Iterator[tuple[int, int]]:
    """All links of a string with so many characters; most: -1 = any number."""
    yield least, most
    while least or most > 0:
        least, most = _next(least, most)
        yield least, most


def _chain(prefix: str, links: set[tuple[int, int]]) -> Rules:
    """The rest of a string after its opening quote.

    The closing quote is part of each: so the masks of all of them are known beforehand.
    """
    made: Rules = {}
    for least, most in sorted(links):
        ways = [] if least else [r'("\"")']
        if most:
            ways.append(f"({_PLAIN} {_link(prefix, *_next(least, most))})")
        made[_link(prefix, least, most)] = f"({' | '.join(ways)})"
    return made


def _merged(rules: Rules, chain: Rules) -> Rules:
    """Rules that differ in their names alone become the first of them.

    They are taken for equal until a difference is found, so that those that refer to one
    another in a circle become one too.
    """
    known = set(map(_bare, rules))
    bodies = {name: _split(body, known) for name, body in rules.items()}
    own = {name for name in rules if name == _ROOT or name in chain or "[" in name}
    classes, num_classes = dict.fromkeys(known, 0), 1
    for _ in range(MOST_ROUNDS):
        found: dict[tuple[str, str, tuple[int, ...]], int] = {}
        classes = {
            _bare(name): found.setdefault(
                (name if name in own else "", skeleton, tuple(classes[each] for each in names)),
                len(found),
            )
            for name, (skeleton, names) in bodies.items()
        }
        if len(found) == num_classes:
            break
        num_classes = len(found)
    else:
        return rules
    first: dict[int, str] = {}
    same = {name: first.setdefault(number, name) for name, number in classes.items()}
    return {
        name: _renamed(body, same)
        for name, body in rules.items()
        if same[_bare(name)] == _bare(name)
    }


def _bare(name: str) -> str:
    """The name that others refer to."""
    return name.partition("[")[0]


def _split(body: str, known: set[str]) -> tuple[str, list[str]]:
    """A body without the names of rules, and these."""
    names = [name for token in _TOKEN.finditer(body) if (name := token["name"]) in known]
    return _renamed(body, dict.fromkeys(names, "")), names


def _renamed(body: str, names: dict[str, str]) -> str:
    def written(found: re.Match[str]) -> str:
        name = found["name"]
        return found[0] if name is None else names.get(name, name) + found[0][len(name) :]

    return _TOKEN.sub(written, body)


def endless(text: str) -> bool:
    """Return whether some rule that an answer can come to has no end: it needs itself.

    >>> endless('root ::= (("(" root ")"))')
    True
    >>> endless('root ::= (("(" root ")") | ("x"))')
    False
    """
    rules = {_bare(name): body for name, body in rules_of(text).items()}
    ways = {name: list(_ways(body, rules)) for name, body in rules.items()}
    left = {name for name in _reached(rules) if ways[name]}
    while True:
        ended = {name for name in left if any(not way & left for way in ways[name])}
        if not ended:
            return bool(left)
        left -= ended


def _reached(rules: Rules) -> set[str]:
    found, due = {_ROOT}, [_ROOT]
    while due:
        for token in _TOKEN.finditer(rules[due.pop()]):
            name = token["name"]
            if name in rules and name not in found:
                found.add(name)
                due.append(name)
    return found


def _ways(body: str, rules: Rules) -> Iterator[set[str]]:
    """For each way to fulfil a rule the rules that it needs; none for what is no plain rule."""
    depth, needed = 0, set[str]()
    for token in _TOKEN.finditer(body):
        mark = token["mark"]
        if depth == 0 and mark != "(":
            return  # a TagDispatch
        if mark == "(":
            depth += 1
        elif mark == ")":
            depth -= 1
        elif mark is None and token["name"] in rules and not token["optional"]:
            needed.add(token["name"])
        if mark == "|" or depth == 0:
            yield needed
            needed = set()
        if depth == 0:
            return  # what follows is looked at, and not taken
