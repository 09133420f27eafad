"""Structural tags, as xgrammar defines their JSON, in llguidance's dialect of Lark.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html.  Free text ends at the text that follows
it, so each format is written with the end of the tag that it fills.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdcluster_worker.structured_output.lark import (
    MAX_WHITE_SPACE,
    FormError,
    lark_of,
    literal,
    pattern,
    schema_rule,
)
from pdcluster_worker.structured_output.schema import PreparedSchema, prepare
from pdcluster_worker.structured_output.xml_arguments import STYLES, XmlArguments

Format = dict[str, Any]
MAX_BARRED = 100
"""Triggers and excluded texts that free texts are without, counted for each."""

MAX_FORMATS = 5_000
"""Formats as written out: once for each end of the tag that they fill."""

MAX_CHARACTER_BYTES = 4

MAX_CLOSING = 16
"""Masks that a budget keeps: each has a bit for every token, and a closing text may be long."""

_ANY = "(?s:.*)"


class ThinkingBudget:
    """At most so many tokens of free text at the start of an answer, between two texts.

    tokens: the bytes of each token of the model.
    """

    def __init__(self, begin: bytes, max_tokens: int, end: bytes, tokens: Sequence[bytes]) -> None:
        self._begin, self._end = begin, end
        self._max_tokens = max_tokens
        self._tokens = tokens
        self._closing: dict[bytes, NDArray[np.uint32]] = {}

    def bar(self, words: NDArray[np.uint32], output: Sequence[int]) -> None:
        """Once the budget is used up, bar all tokens of a mask but those of the closing text."""
        rest = self._rest(output)
        if rest:
            closing = words & self._mask(rest, len(words))
            if closing.any():  # else a character is incomplete
                words[:] = closing

    def _rest(self, output: Sequence[int]) -> bytes:
        """Return what must still come of the closing text; nothing while there are tokens left."""
        begin, end, most = self._begin, self._end, self._max_tokens
        # each token has a byte or more, so that all is closed after so many
        if not most <= len(output) <= most + len(begin) + len(end) + MAX_CHARACTER_BYTES:
            return b""
        text, num_used = b"", 0
        for token_id in output:
            num_used += len(text) >= len(begin)
            text += self._tokens[token_id]
        thought = text[len(begin) :]
        if not text.startswith(begin) or num_used < most or end in thought:
            return b""
        return next(end[size:] for size in range(len(end), -1, -1) if thought.endswith(end[:size]))

    def _mask(self, rest: bytes, num_words: int) -> NDArray[np.uint32]:
        if rest not in self._closing:
            if len(self._closing) == MAX_CLOSING:
                self._closing.clear()
            bits = np.zeros(num_words * 32, dtype=np.uint8)
            bits[
                [
                    index
                    for index, token in enumerate(self._tokens)
                    if token and rest.startswith(token)
                ]
            ] = 1
            self._closing[rest] = np.packbits(bits, bitorder="little").view(np.uint32)
        return self._closing[rest]


class TagGrammar:
    """The rules of one structural tag.

    tokens: bytes of each token of the model.  looseness: of `schema.prepare`.
    schemas: those of JSON in it, for the place of a fault.
    """

    def __init__(self, tokens: Sequence[bytes], *, looseness: int) -> None:
        self.budget: ThinkingBudget | None = None
        self.schemas: list[PreparedSchema] = []
        self._tokens = tokens
        self._looseness = looseness
        self._num_barred = 0
        self._num_formats = 0
        self._rules: list[str] = []
        self._grammars: list[dict[str, str]] = []

    def compile(self, text: str) -> tuple[str, list[dict[str, str]]]:
        """The Lark text, and the grammars that it refers to.  Raises FormError."""
        try:
            tag = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise FormError(f"is no JSON: {e}") from e
        if not isinstance(tag, dict):
            raise FormError("must be an object with a format")
        form = _of_structures(tag) if "structures" in tag else tag.get("format")
        start = self._format(form, "", is_first=True)
        return "\n".join([f"start: {start}", *self._rules]), self._grammars

    def _format(self, form: Any, end: str, *, is_first: bool = False) -> str:
        """The expression of a format, and of the text that ends it."""
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            raise FormError(f"has more than {MAX_FORMATS} formats, each for each of its ends")
        kind = form.get("type") if isinstance(form, dict) else None
        writers: dict[str, Callable[[Format, str], str]] = {
            "any_text": self._text,
            "triggered_tags": self._triggered,
            "dispatch": self._dispatch,
            "or": lambda form, end: (
                f"({' | '.join(self._format(each, end) for each in form['elements'])})"
            ),
        }
        try:
            if kind in writers and not form.get("max_tokens"):
                return writers[kind](form, end)
            if kind == "sequence":
                return self._sequence(form["elements"], end, is_first=is_first)
            if kind == "optional":
                inner = self._format(form["content"], "", is_first=is_first)
                return f"({inner})? {literal(end)}"
            if kind == "tag":
                return f"{self._tag(form, is_first=is_first)} {literal(end)}"
            return f"{self._closed(kind, form)} {literal(end)}"
        except (KeyError, TypeError, AttributeError) as e:
            raise FormError(f"a format of type {kind!r} is not complete: {e}") from e

    def _closed(self, kind: Any, form: Format) -> str:
        """A format that knows where it ends."""
        writers: dict[Any, Callable[[Format], str]] = {
            "const_string": lambda form: literal(form["value"]),
            "regex": lambda form: f"/{pattern(form['pattern'])}/",
            "json_schema": self._schema,
            "grammar": self._grammar,
            "token": lambda form: f"<[{self._token(form['token'])}]>",
            "exclude_token": self._other_token,
            "any_tokens": self._other_tokens,
            "star": lambda form: f"({self._format(form['content'], '')})*",
            "plus": lambda form: f"({self._format(form['content'], '')})+",
            "repeat": self._repeated,
            "tags_with_separator": self._row,
            "token_triggered_tags": self._token_triggered,
        }
        if kind == "any_text":
            raise FormError(
                "any_text.max_tokens is for the first tag of an answer, whose end is a text: use "
                "max_chars"
            )
        if kind not in writers:
            raise FormError(f"Format type not recognized: {kind}")
        return writers[kind](form)

    def _repeated(self, form: Format) -> str:
        most = None if form["max"] == -1 else _count(form, "max")
        bounds = f"{_count(form, 'min') or 0},{'' if most is None else most}"
        return f"({self._format(form['content'], '')}){{{bounds}}}"

    def _other_tokens(self, form: Format) -> str:
        most = _count(form, "max_tokens")
        return f"{self._other_token(form)}{'*' if most is None else f'{{0,{most}}}'}"

    def _sequence(self, elements: list[Format], end: str, *, is_first: bool) -> str:
        *first, last = elements or [{"type": "const_string", "value": ""}]
        parts = [
            self._format(each, "", is_first=is_first and index == 0)
            for index, each in enumerate(first)
        ]
        parts.append(self._format(last, end, is_first=is_first and not first))
        return f"({' '.join(parts)})"

    def _tag(self, tag: Format, *, is_first: bool = False, begin: str | None = None) -> str:
        """begin: what is left of its beginning, where that was matched in part."""
        content, ends = tag["content"], tag["end"]
        before = self._edge(tag["begin"] if begin is None else begin)
        if isinstance(ends, dict):
            return f"{before} {self._format(content, '')} {self._edge(ends)}"
        limit = _count(content, "max_tokens") if content["type"] == "any_text" else None
        if limit is not None and is_first and isinstance(ends, str) and ends:
            self.budget = ThinkingBudget(tag["begin"].encode(), limit, ends.encode(), self._tokens)
            content = {**content, "max_tokens": None}
        if isinstance(ends, str):
            return f"{before} {self._format(content, ends)}"
        return f"{before} ({' | '.join(self._format(content, each) for each in ends)})"

    def _edge(self, edge: str | Format) -> str:
        return literal(edge) if isinstance(edge, str) else self._closed("token", edge)

    def _text(self, form: Format, end: str) -> str:
        most = _count(form, "max_chars")
        body = _ANY if most is None else f"(?s:.{{0,{most}}})"
        return self._free(body, end, form.get("excludes", []))

    def _free(self, body: str, end: str, excludes: list[str]) -> str:
        """Free text up to its end; without one up to the end of the answer."""
        self._num_barred += len(excludes)
        if self._num_barred > MAX_BARRED:
            raise FormError(f"has more than {MAX_BARRED} triggers and excludes in its free texts")
        name = f"TEXT_{len(self._rules)}"
        barred = "".join(f" & ~/{_ANY}{_plain(each)}{_ANY}/" for each in excludes)
        self._rules.append(f"{name}: /{body}/{barred}")
        return name if not end else self._rule(name, f"[suffix={literal(end)}]")

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _triggered(self, form: Format, end: str) -> str:
        """Text in which each trigger begins one of its tags."""
        rules = []
        for trigger in form["triggers"]:
            tags = [tag for tag in form["tags"] if tag["begin"].startswith(trigger)]
            rests = [self._tag(tag, begin=tag["begin"][len(trigger) :]) for tag in tags]
            rules.append((trigger, f"({' | '.join(rests)})"))
        if any(not tag["begin"].startswith(tuple(form["triggers"])) for tag in form["tags"]):
            raise FormError("triggered_tags: each tag must begin with one of the triggers")
        least = bool(form.get("at_least_one"))
        if not least:
            return self._dispatched(form, rules, end, once=bool(form.get("stop_after_first")))
        first = f"({' | '.join(self._tag(tag) for tag in form['tags'])})"
        if form.get("stop_after_first"):
            return f"{first} {literal(end)}"
        return f"{first} {self._dispatched(form, rules, end, once=False)}"

    def _dispatch(self, form: Format, end: str) -> str:
        rules = [(trigger, self._format(content, "")) for trigger, content in form["rules"]]
        return self._dispatched(form, rules, end, once=not form.get("loop", True))

    def _dispatched(
        self, form: Format, rules: list[tuple[str, str]], end: str, *, once: bool
    ) -> str:
        triggers = [trigger for trigger, _ in rules]
        excludes = form.get("excludes", [])
        before = [*excludes, *([end] if end else [])]
        bodies = [
            self._rule(
                f"{self._free(_ANY, trigger, [*before, *_others(triggers, trigger)])} {body}"
            )
            for trigger, body in rules
        ]
        rest = self._free(_ANY, end, [*excludes, *triggers])
        calls = f"({' | '.join(bodies)})"
        return f"({calls} {literal(end)} | {rest})" if once else f"({calls}* {rest})"

    def _row(self, form: Format) -> str:
        tags = self._rule(" | ".join(self._tag(tag) for tag in form["tags"]))
        row = tags
        if not form.get("stop_after_first"):
            row = f"{tags} ({literal(form['separator'])} {tags})*"
        return f"({row})" if form.get("at_least_one") else f"({row})?"

    def _token_triggered(self, form: Format) -> str:
        barred = [*form.get("exclude_tokens", []), *form["trigger_tokens"]]
        free = f"{self._other_token({'exclude_tokens': barred})}*"
        tags = f"({' | '.join(self._tag(tag) for tag in form['tags'])})"
        if form.get("stop_after_first"):
            return tags if form.get("at_least_one") else f"({free} {tags}?)"
        return f"({tags if form.get('at_least_one') else ''} ({free} {tags})* {free})"

    def _schema(self, form: Format) -> str:
        schema = form["json_schema"]
        style = form.get("style", "json")
        prepared = prepare(schema, strict=form.get("strict") is True, looseness=self._looseness)
        self.schemas.append(prepared)
        most = _count(form, "max_whitespace_cnt")
        white_space = MAX_WHITE_SPACE if most is None else most
        if style == "json":
            return self._rule(schema_rule(prepared.schema, white_space))
        if style not in STYLES:
            raise FormError(f"json_schema.style {style!r}: use json, {', '.join(STYLES)}")
        return XmlArguments(prepared.schema, STYLES[style], self._rule).rule()

    def _grammar(self, form: Format) -> str:
        name = f"grammar_{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": lark_of(form["grammar"])})
        return f"@{name}"

    def _other_token(self, form: Format) -> str:
        barred = [self._token(token) for token in form.get("exclude_tokens", [])]
        return f"<[^{','.join(map(str, barred))}]>" if barred else "<[*]>"

    def _token(self, token: int | str) -> int:
        if isinstance(token, int):
            return token
        try:
            return self._tokens.index(token.encode())
        except ValueError as e:
            raise FormError(f"{token!r} is no token of this model that has text") from e


def _count(form: Format, name: str) -> int | None:
    """A number that becomes a part of the grammar."""
    value: int | None = form.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise FormError(f"{name} must be a whole number that is not negative")
    return value


def _others(triggers: list[str], trigger: str) -> list[str]:
    return [each for each in triggers if each != trigger]


def _plain(text: str) -> str:
    """A text within a pattern."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)


def _of_structures(tag: Format) -> Format:
    """The format of a tag in the older form of OpenAI-compatible servers."""
    try:
        tags = [
            {
                "type": "tag",
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": each["schema"]},
                "end": each["end"],
            }
            for each in tag["structures"]
        ]
        return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError) as e:
        raise FormError(f"structures and triggers are not complete: {e}") from e
