"""Pieces of llguidance's dialect of Lark."""

import json
from typing import Any

from llguidance import regex_to_lark

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
