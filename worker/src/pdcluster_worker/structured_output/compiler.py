"""Each kind of constraint as a matcher of llguidance; an error says where in it the fault lies."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask

from pdcluster_worker.messages.requests import Constraint
from pdcluster_worker.structured_output.lark import (
    MAX_CHARACTERS,
    FormError,
    lark_of,
    literal,
    pattern,
    schema_rule,
)
from pdcluster_worker.structured_output.schema import MAX_LOOSENESS, prepare
from pdcluster_worker.structured_output.schema_nodes import Pointer, SchemaError, children
from pdcluster_worker.structured_output.structural_tags import TagGrammar, ThinkingBudget

MAX_GRAMMAR_SYMBOLS = 100_000
"""About a tenth of a second of compiling; a schema of 500 properties has 10,000."""

MAX_ROW_ITEMS = 8_000
"""Ways on from one place in an answer; four for each optional property."""

MAX_LEXER_STATES = 120_000
"""States of 0.4 to 2.5 kB each, which the requests of one form add as they go on; a string with a
`maxLength` adds nine for each character.
"""

BYTES_PER_CHARACTER = 500
BYTES_PER_SCHEMA = 7_000
"""Upper bounds of a compiled grammar's memory."""

MAX_ALL_OF = 8
"""Patterns that a lexeme must match at once: the time for it is exponential in them."""

MAX_TRIES = 200
"""Compiles that look for the place of a fault."""

_LARK = re.compile(r"^\s*\??start\s*(?:\[[^\]]*\]\s*)?:(?!:=)", re.MULTILINE)
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Any split of a text into tokens is allowed, not only that of the tokenizer."""

_LISTING = re.compile(r"\n\s*\d+ \| .*|<non-verbose/>.*", re.DOTALL)
_WHERE = re.compile(r"^(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?")
_REGEX = re.compile(r"regex parse error:\n    .*\n    ( *)\^.*\n(?:.*\n)*?error: (.*)")
NO_VALUE = "no value fits it"
_NO_TEXT = "NoExtensionBias"
MAX_REASON = 300
"""Characters of what llguidance says of a fault, which may hold whole patterns."""


@dataclass(frozen=True, slots=True)
class CompiledForm:
    matcher: LLMatcher  # at the beginning, to be copied for each request
    compile_matcher: Callable[[], LLMatcher]  # another, with a lexer of its own
    seconds: float  # that this takes, of a core
    num_bytes: int  # at most, estimated
    budget: ThinkingBudget | None = None
    # Set once the states of the lexer, which copies share, are used up.
    is_spent: Event = field(default_factory=Event, compare=False)


class _Vocabulary:
    """A tokenizer as llguidance reads it; no token of it ends an answer."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = [*tokens, b""]
        self.eos_token_id = len(tokens)

    def __call__(self, text: bytes) -> list[int]:
        return []


class ConstraintCompiler:
    """Compiles constraints over one vocabulary.  tokens: the bytes of each."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        self._num_words = len(tokens) // 32 + 1
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(tokens)), n_vocab=len(tokens) + 1, eos_token=[len(tokens)]
        )
        self._limits = LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            max_items_in_row=MAX_ROW_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            verbose_errors=False,
        )

    def compile(self, constraint: Constraint) -> CompiledForm:
        """Raises FormError."""
        try:
            return self._form(constraint)
        except RecursionError as e:
            raise FormError("is nested too deeply: make it flatter") from e

    def _form(self, constraint: Constraint) -> CompiledForm:
        text = constraint.text
        match constraint.kind:
            case "json_object":
                return self._compile(f"start: {schema_rule({'type': 'object'})}")
            case "json_schema":
                return self._loosely(self._schema, text, strict=constraint.strict)
            case "regex":
                return self._compile(f"start: /{pattern(text)}/")
            case "choice":
                return self._compile(f"start: {' | '.join(map(literal, json.loads(text)))}")
            case "grammar":
                return self._grammar(text)
            case "structural_tag":
                return self._loosely(self._tag, text)
            case "rendered":
                raise FormError("is a stock engine's: send the request to a worker with one")

    def _compile(self, lark: str, others: Sequence[dict[str, str]] = ()) -> CompiledForm:
        grammars = [{"name": "answer", "lark_grammar": lark + _NO_FORCING}, *others]
        num_characters = sum(len(grammar["lark_grammar"]) for grammar in grammars)
        if num_characters > MAX_CHARACTERS:
            raise FormError(
                f"has {num_characters} characters written out, over {MAX_CHARACTERS}: make it "
                "shorter"
            )
        compile_matcher = partial(
            LLMatcher,
            self.tokenizer,
            json.dumps({"grammars": grammars}),
            log_level=0,
            limits=self._limits,
        )
        started = time.thread_time()
        matcher = compile_matcher()
        seconds = time.thread_time() - started
        if not matcher.is_error():  # that no text has a form shows only here
            fill_next_token_bitmask(matcher, np.empty((1, self._num_words), dtype=np.int32))
        if matcher.is_error():
            raise FormError(explain(matcher.get_error()))
        return CompiledForm(matcher, compile_matcher, seconds, BYTES_PER_CHARACTER * num_characters)

    def _grammar(self, text: str) -> CompiledForm:
        if not _LARK.search(text):
            return self._compile(lark_of(text))
        if "%json" in text or "%import" in text:
            raise FormError("has %json or %import: send a schema as json, in a field of its own")
        if text.count("&") > MAX_ALL_OF:
            raise FormError(f"has more than {MAX_ALL_OF} &: join fewer patterns")
        return self._compile(text)

    def _loosely(
        self, compile_as: Callable[..., CompiledForm], text: str, **options: Any
    ) -> CompiledForm:
        """Compile a form, and where that fails looser ones."""
        errors = []
        for looseness in range(MAX_LOOSENESS + 1):
            try:
                return compile_as(text, looseness=looseness, **options)
            except FormError as e:
                errors.append(e)
                if NO_VALUE in str(e):
                    break  # no looser form is what was meant
        raise errors[0]

    def _schema(self, text: str, *, strict: bool, looseness: int) -> CompiledForm:
        prepared = prepare(json.loads(text), strict=strict, looseness=looseness)
        try:
            form = self._compile(f"start: {schema_rule(prepared.schema)}")
        except FormError as e:
            raise self._located(prepared.schema, e) from e
        return replace(form, num_bytes=form.num_bytes + BYTES_PER_SCHEMA * prepared.num_schemas)

    def _tag(self, text: str, *, looseness: int) -> CompiledForm:
        tag = TagGrammar(self._tokens, looseness=looseness)
        try:
            lark, others = tag.compile(text)
        except SchemaError as e:
            raise FormError(f"in a schema of the structural tag: {e}") from e
        try:
            form = self._compile(lark, others)
        except FormError as e:
            for prepared in tag.schemas:
                try:
                    self._compile(f"start: {schema_rule(prepared.schema)}")
                except FormError as inner:
                    located = self._located(prepared.schema, inner)
                    raise FormError(f"in a schema of the structural tag: {located}") from e
            raise
        count = sum(prepared.num_schemas for prepared in tag.schemas)
        return replace(form, num_bytes=form.num_bytes + BYTES_PER_SCHEMA * count, budget=tag.budget)

    def _located(self, root: Any, error: FormError) -> SchemaError:
        """The fault with the innermost schema that cannot be compiled by itself."""
        definitions = {
            name: root[name]
            for name in ("$defs", "definitions")
            if isinstance(root, dict) and name in root
        }
        place: Pointer = ()
        due = list(children(place, root)) if isinstance(root, dict) else []
        for _ in range(MAX_TRIES):
            if not due:
                break
            inner, part = due.pop(0)
            fault = self._fault({**definitions, **part}) if isinstance(part, dict) else None
            if fault is not None:
                place, error, due = inner, fault, list(children(inner, part))
        return SchemaError(place, str(error))

    def _fault(self, schema: Any) -> FormError | None:
        """Return why a schema cannot be compiled by itself, if it refers to nothing outside."""
        try:
            self._compile(f"start: {schema_rule(schema)}")
        except FormError as e:
            return None if "does not exist" in str(e) else e
        return None


def explain(error: str) -> str:
    """Return what llguidance says of an error, in one line.

    >>> explain("regex parse error:\\n    a(\\n     ^\\nerror: open")
    'regular expression, position 2: open'
    """
    if _NO_TEXT in error:
        return f"{NO_VALUE}: no answer can have this form"
    regex = _REGEX.search(error)
    if regex is not None:
        return f"regular expression, position {len(regex[1]) + 1}: {regex[2]}"
    text = _WHERE.sub("", " ".join(_LISTING.sub("", error).split()))
    text = text.replace("Unsatisfiable schema", NO_VALUE)
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
