"""Forms in llguidance's dialect of Lark: its pieces, and grammars in EBNF."""

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import regex_to_lark


class FormError(ValueError):
    """A constraint that cannot be compiled; the message says where and why."""


MAX_WHITE_SPACE = 20
"""Most white space between two parts of a JSON text: a model without an answer must not fill it
with blanks.
"""

MAX_CHARACTERS = 500_000
"""Length of a form as it is written out, with its copies of definitions: up to 215 MB compiled."""


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # Lark has none bare


def pattern(regex: str) -> str:
    """A regular expression that matches a whole text, as it stands between slashes."""
    return str(regex_to_lark(regex))


def schema_rule(schema: Any, white_space: int = MAX_WHITE_SPACE) -> str:
    """The expression of a prepared schema.  white_space: most of it between two parts."""
    options = {
        "whitespace_pattern": rf"[ \n\r\t]{{0,{white_space}}}",
        "coerce_one_of": True,
        "lenient": True,
    }
    if not isinstance(schema, dict):
        schema = {} if schema else {"enum": []}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<head>[\w.\-]+)\s*::=
    |(?P<name>[A-Za-z_][\w.\-]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<members>\[(?:\\.|[^\]\\])*\])
    |(?P<mark>[()|*+?.]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})"
    r"|u\{(?P<b>[0-9a-fA-F]{1,6})\}|(?P<one>.))",
    re.DOTALL,
)
_ONE = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "0": "\0"}
_SETS = "dDwWsS"
_IN_CLASS = "\\]^-[&~/"


def lark_of(text: str) -> str:
    """An EBNF, as vLLM and llama.cpp take it, whose rule `root` is the answer.  Raises FormError.

    Each character is a lexeme of its own: of the longest one `[a-z]+ "x"` would never end.

    >>> print(lark_of('root ::= "a" | digits\\ndigits ::= [0-9]+'))
    start: ("a") | r1
    r1: /[0-9]/ +
    """
    heads = [found["head"] for found in _tokens(text) if found["head"]]
    names = {name: f"r{number}" for number, name in enumerate(heads)}
    if "root" not in names:
        raise FormError("has no rule root")
    if len(names) < len(heads):
        twice = next(name for name in heads if heads.count(name) > 1)
        raise FormError(f"has the rule {twice} twice")
    names["root"] = "start"
    lines: list[list[str]] = []
    for found in _tokens(text):
        if found["head"]:
            lines.append([f"{names[found['head']]}:"])
        elif not lines:
            raise FormError(f"{_position(text, found.start())}: a rule begins as name ::=")
        else:
            lines[-1].append(_written(found, names, text))
    return "\n".join(" ".join(line) for line in lines)


def _tokens(text: str) -> Iterator[re.Match[str]]:
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise FormError(f"{_position(text, place)}: {text[place]!r} is not expected here")
        if not found["space"]:
            yield found
        place = found.end()


def _position(text: str, place: int) -> str:
    line = text.count("\n", 0, place) + 1
    return f"line {line}, column {place - text.rfind(chr(10), 0, place)}"


def _written(found: re.Match[str], names: dict[str, str], text: str) -> str:
    if found["name"]:
        if found["name"] not in names:
            raise FormError(
                f"{_position(text, found.start())}: the rule {found['name']} is not defined"
            )
        return names[found["name"]]
    if found["text"]:
        lexemes = [literal(each) for each in _ESCAPE.sub(_character, found["text"][1:-1])]
        return "(" + (" ".join(lexemes) or '""') + ")"
    if found["members"]:
        return f"/{_class(found['members'])}/"
    return "/(?s:.)/" if found["mark"] == "." else re.sub(r"\s", "", found["mark"])


def _character(found: re.Match[str]) -> str:
    digits = found["x"] or found["u"] or found["U"] or found["b"]
    if digits:
        code = int(digits, 16)
        return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else "\ufffd"
    return _ONE.get(found["one"], found["one"])


def _class(members: str) -> str:
    negated = "^" if members[1] == "^" else ""
    body = members[1 + len(negated) : -1]
    parts: list[str] = []
    place = 0
    for found in _ESCAPE.finditer(body):
        parts.append(_plain(body[place : found.start()]))
        is_set = found["one"] is not None and found["one"] in _SETS
        parts.append(found[0] if is_set else _literal(_character(found)))
        place = found.end()
    return f"[{negated}{''.join(parts)}{_plain(body[place:])}]"


def _plain(part: str) -> str:
    """Characters without an escape, among which a dash makes a range."""
    return "".join(each if each == "-" else _literal(each) for each in part)


def _literal(character: str) -> str:
    if character in _IN_CLASS:
        return f"\\{character}"
    return character if character.isprintable() else f"\\x{{{ord(character):x}}}"
