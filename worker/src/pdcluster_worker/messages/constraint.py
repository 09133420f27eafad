"""Constraint on the text of an answer, as it travels with a request.

The text is checked by the server that takes the request, and compiled by each
engine that samples under it.
"""

from typing import Literal

import msgspec

ConstraintKind = Literal[
    "json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"
]

CONSTRAINT_PARAM = "constraint"
"""Name in errors of the part of a request that an engine cannot compile."""

MAX_CONSTRAINT_CHARACTERS = 131_072
"""Longest text of a constraint; OpenAI's limit on the names and values of a schema is 120,000."""


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form that the text of an answer must have; it travels as text, and each engine compiles
    it for itself.

    text:  of kind json_schema a schema; of json_object nothing, for any object; of regex a regular
           expression that the whole answer matches; of choice a JSON list of strings; of grammar a
           grammar in EBNF, whose rule `root` is the answer; of structural_tag xgrammar's JSON of
           one.
    strict: of json_schema: a schema of which a part cannot be enforced is refused; else that part
            is left out.
    """

    kind: ConstraintKind
    text: str = ""
    strict: bool = False
