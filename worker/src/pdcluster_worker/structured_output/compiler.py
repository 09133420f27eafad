"""Each kind of constraint as a compiled grammar; an error says where in the constraint it lies.

Runs in the compile process only.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdcluster_worker.messages.constraint import Constraint
from pdcluster_worker.structured_output.native import compiler_over, complaint
from pdcluster_worker.structured_output.rules import endless, simplified
from pdcluster_worker.structured_output.schema import PreparedSchema, SchemaError, pointer, prepare
from pdcluster_worker.structured_output.tags import prepared_tag

MOST_WHITE_SPACE = 20
"""Most white space between two parts of a JSON text: a model without an answer must not fill it
with blanks.
"""

_LARK = re.compile(r"^\s*\??start\s*:(?!:=)", re.MULTILINE)
_ANY_OBJECT = '{"type":"object"}'
_NO_TEXT = "no text at all fits it"
_ENDLESS = f"{_NO_TEXT}: it needs itself without end, so make that optional"


class FormError(ValueError):
    """A constraint that cannot be compiled; the message says where and why."""


class EndlessError(RuntimeError):
    """A grammar has a rule that no text can end."""


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """A constraint as xgrammar's Grammar, and compiled."""

    grammar: Any
    compiled: Any


class ConstraintCompiler:
    """Compiles constraints over one vocabulary.  native: see `structured_output.native`."""

    def __init__(self, native: Any, vocabulary: Any, vocab_size: int) -> None:
        self._native = native
        self._vocabulary = vocabulary
        self._num_words = -(-vocab_size // 32)
        self._compiler = compiler_over(vocabulary)

    def compile(self, constraint: Constraint) -> CompiledForm:
        """The grammar and its compiled form.  Raises FormError, and RuntimeError as xgrammar
        does.
        """
        grammar = self._grammar(constraint)
        compiled = self._compiler.compile_grammar_ebnf(grammar)
        matcher = self._native.GrammarMatcher(compiled, [0], False, -1, None)
        words = np.zeros((1, self._num_words), dtype=np.int32)
        if matcher.fill_next_token_bitmask(words, 0, False) and not words.any():
            raise FormError(f"#: {_NO_TEXT}" if constraint.kind == "json_schema" else _NO_TEXT)
        return CompiledForm(grammar, compiled)

    def _grammar(self, constraint: Constraint) -> Any:
        text = constraint.text
        match constraint.kind:
            case "json_object":
                grammar = self._json(_ANY_OBJECT)
            case "json_schema":
                grammar = self._schema(text, strict=constraint.strict)
            case "regex":
                grammar = self._native.Grammar.from_regex(text, False)
            case "choice":
                grammar = self._rules(f"root ::= {' | '.join(map(literal, json.loads(text)))}")
            case "grammar":
                grammar = (
                    _with_ends(self._native.Grammar.from_lark(text, self._vocabulary, [], []))
                    if _LARK.search(text)
                    else self._rules(text)
                )
            case "structural_tag":
                grammar = self._tag(text)
        return grammar

    def _json(self, schema: str) -> Any:
        return self._simplified(self._native.Grammar.from_json_schema(schema, *_JSON, False))

    def _simplified(self, grammar: Any) -> Any:
        return self._rules(simplified(grammar.to_string()))

    def _rules(self, text: str) -> Any:
        return _with_ends(self._native.Grammar.from_ebnf(text, "root"))

    def _schema(self, text: str, *, strict: bool) -> Any:
        try:
            prepared = prepare(json.loads(text), strict=strict)
        except SchemaError as e:
            raise FormError(str(e)) from e
        try:
            return self._json(json.dumps(prepared.schema))
        except RuntimeError as e:
            raise FormError(self._place(prepared, e)) from e

    def _tag(self, text: str) -> Any:
        try:
            prepared = prepared_tag(text, MOST_WHITE_SPACE)
        except SchemaError as e:
            raise FormError(f"in a schema of the structural tag: {e}") from e
        try:
            grammar = self._native.Grammar.from_structural_tag(prepared)
        except RuntimeError as e:
            if "tokenizer_info" not in str(e):
                raise
            # tokens by their text, which the compiler alone looks up
            grammar = self._compiler.compile_structural_tag(prepared).grammar()
        try:
            return self._simplified(grammar)
        except EndlessError as e:
            raise FormError(f"in a schema of the structural tag: {e}") from e

    def _place(self, prepared: PreparedSchema, error: RuntimeError) -> str:
        """Describe the fault, with the innermost schema that is refused by itself."""
        is_endless = isinstance(error, EndlessError)
        for place, part in sorted(prepared.nodes, key=lambda node: -len(node[0])):
            if "$ref" in part and (not is_endless or part["$ref"] == "#"):
                continue
            try:
                _with_ends(
                    self._native.Grammar.from_json_schema(
                        json.dumps(prepared.whole(part)), *_JSON, False
                    )
                )
            except RuntimeError as e:
                return f"{pointer(place)}: {complaint(e)}"
        return f"#: {complaint(error)}" if is_endless else complaint(error)


_JSON = (True, None, None, False, MOST_WHITE_SPACE, False)
"""Arguments of xgrammar's functions on schemas.

Any white space, so no indent and no separators; not its strict mode; properties in order.
"""


def _with_ends(grammar: Any) -> Any:
    if endless(grammar.to_string()):
        raise EndlessError(_ENDLESS)
    return grammar


def literal(text: str) -> str:
    """A text as a literal of EBNF.

    >>> print(literal('say "no"'))
    "say \\"no\\""
    """
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08X}"
