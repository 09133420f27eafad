"""JSON by pydantic's core, which reads and writes it several times as fast as the standard library.

For bodies of the API server, of which the operator reads and writes some hundred for each new
PDCluster.  It stops at some 200 levels of maps and lists, and the API server takes 10,000 of them
in a `podTemplate`: one such object would hide all of its kind, of every user.  So what is deeper
than any object that is served is read as null.
"""

import json
import re
from decimal import Decimal
from typing import Any

from pydantic_core import from_json, to_json

_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON may have in a string as they are, and YAML refuses or takes for an end of
line.
"""

_UNLIKE_GO = re.compile(r"[:,[]-?[0-9]+(?:[.eE]|(?<=[0-9]{19}))")
"""A number, perhaps, that Go writes otherwise: a float, or an integer of 19 digits."""
_STRING_OR_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*')
MAX_DEPTH = 180
"""Levels of a list of the deepest objects that are not refused, and room."""
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_ESCAPED_BY_GO = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}


def encoded(value: Any) -> bytes:
    """A value as JSON without spaces, in UTF-8.  Raises ValueError, for too many levels too."""
    return to_json(value)


def encoded_as_yaml(value: Any) -> bytes:
    """A value as JSON that says the same when it is read as YAML.

    Of characters that YAML cannot have as they are the code is written, as in `\\u2028`; of others
    it is not: YAML refuses the pair of codes that JSON has for an emoji.
    """
    text = encoded(value)
    if text.isascii() and b"\x7f" not in text:
        return text
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text.decode()).encode()


def encoded_as_stored(value: Any) -> bytes:
    """A value as the API server itself writes it: keys in their order, numbers by Go's rules.

    What it keeps byte for byte, as the data of a ControllerRevision, then stays as it is when
    another field is changed.
    """
    text = json.dumps(
        value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False
    )
    if _UNLIKE_GO.search(text):
        text = _STRING_OR_NUMBER.sub(lambda found: _number_of_go(found[0]), text)
    return text.translate(_ESCAPED_BY_GO).encode()


def _number_of_go(text: str) -> str:
    """A number as Go's encoding/json writes it; a string is left as it is.

    An integer of more than 64 bits is a float there.
    """
    if text.startswith('"') or (text.lstrip("-").isdecimal() and -(2**63) <= int(text) < 2**63):
        return text
    number = float(text)
    if number == 0:
        return "0"
    if 1e-6 <= abs(number) < 1e21:
        digits = format(Decimal(repr(number)), "f")
        return digits.removesuffix(".0")
    mantissa, _, exponent = repr(number).partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent):+03d}".replace("e-0", "e-")


def decoded(content: bytes) -> Any:
    """The value that JSON says, null in place of what is deeper than MAX_DEPTH.

    Raises ValueError.
    """
    try:
        return from_json(content)
    except ValueError as e:
        if "recursion" not in str(e):
            raise
    return from_json(_cut(content))


def _cut(content: bytes) -> bytes:
    """JSON with null in place of each map and list that is too deep."""
    kept, begin, level = list[bytes](), 0, 0
    for found in _STRING_OR_BRACKET.finditer(content):
        if found[0] in b"{[":
            level += 1
            if level == MAX_DEPTH + 1:
                kept.append(content[begin : found.start()])
        elif found[0] in b"}]":
            if level == MAX_DEPTH + 1:
                kept.append(b"null")
                begin = found.end()
            level -= 1
    return b"".join((*kept, content[begin:]))
