"""Constraint on the text of an answer, as it travels with a request."""

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
    """The form that the text of an answer must have; each engine compiles it.

    text: of json_schema a schema; of json_object nothing; of regex an expression that the whole
    answer matches; of choice a JSON list of strings; of grammar EBNF with the rule `root`; of
    structural_tag JSON. strict: of json_schema: a part that cannot be enforced is refused; else
    it is left out.
    """

    kind: ConstraintKind
    text: str = ""
    strict: bool = False
