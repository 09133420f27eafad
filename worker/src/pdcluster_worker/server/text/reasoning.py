"""Separates the text between think tags from the answer, and parses one choice."""

from collections.abc import Sequence
from typing import Literal

from pdcluster_worker.config.worker import ReasoningParserName
from pdcluster_worker.server.text.events import (
    CallParser,
    Part,
    PlainText,
    ReasoningDelta,
    TextDelta,
    TrailingSpace,
    held_back,
)

OPEN, CLOSE = "<think>", "</think>"

Start = Literal["inside", "before", "answer"]
"""An answer begins in reasoning, where an opening tag may come, or after all reasoning."""

ReasoningName = Literal["deepseek_r1", "qwen3"]
"""Without a tag in the prompt, `qwen3` looks for an opening one and takes text without it for the
answer; `deepseek_r1`, whose model may leave it out, for reasoning.
"""


def reasoning_parser_for(name: ReasoningParserName, template: str) -> ReasoningName | None:
    """`auto`: by the model's chat template; one that can be asked not to think is Qwen3's."""
    if name == "none":
        return None
    if name != "auto":
        return name
    if CLOSE not in template:
        return None
    return "deepseek_r1" if "<\uff5cAssistant\uff5c>" in template else "qwen3"


def start_for(name: ReasoningName, prompt: str) -> Start:
    """Beginning of an answer to this prompt.

    >>> start_for("qwen3", "<|assistant|><think>"), start_for("deepseek_r1", "<think></think>")
    ('inside', 'answer')
    """
    end = prompt.rstrip()
    if end.endswith(OPEN):
        return "inside"
    if end.endswith(CLOSE):
        return "answer"
    return "inside" if name == "deepseek_r1" else "before"


def start_within(message: str) -> Start:
    return "inside" if message.rfind(OPEN) > message.rfind(CLOSE) else "answer"


Split = tuple[str, str]
"""Reasoning, and the answer's text."""


class ThinkTags:
    def __init__(self, start: Start) -> None:
        self._state: Start = start
        self.has_reasoned = start == "inside"
        self._text = ""
        # at the end of the reasoning so far: dropped if that is its end
        self._space = TrailingSpace(drops=True)

    @property
    def is_reasoning(self) -> bool:
        return self._state == "inside"

    def feed(self, text: str) -> Split:
        if self._state == "answer":
            return "", text
        self._text += text
        return self._before() if self._state == "before" else self._inside()

    def end(self) -> Split:
        text, self._text = self._text, ""
        if self._state == "inside":
            return self._space.shown(text) + self._space.rest(), ""
        self._state = "answer"
        return "", text

    def _before(self) -> Split:
        start = self._text.lstrip()
        if start.startswith(OPEN):
            self._state, self._text = "inside", start[len(OPEN) :]
            self.has_reasoned = True
            return self._inside()
        return ("", "") if OPEN.startswith(start) else self.end()

    def _inside(self) -> Split:
        before, tag, after = self._text.partition(CLOSE)
        if tag:
            self._state, self._text = "answer", ""
            return self._space.shown(self._opened(before)), after
        certain = len(self._text) - held_back(self._text, [OPEN, CLOSE])
        text, self._text = self._text[:certain], self._text[certain:]
        return self._space.shown(self._opened(text)), ""

    def _opened(self, text: str) -> str:
        """A model may write the opening tag although the prompt has one."""
        while self._space.drops and (start := text.lstrip()).startswith(OPEN):
            text = start[len(OPEN) :]
        return text


class UnclosedReasoning:
    """Reasoning that may never be closed: text waits from the first call on, which is one then."""

    def __init__(self, calls: CallParser) -> None:
        self._calls = calls
        self._text = ""  # that waits
        self._has_call = False

    def feed(self, text: str) -> str:
        self._text += text
        return "" if self._has_call or not text else self._shown(self._calls.feed(text))

    def close(self) -> str:
        text, self._text = self._text, ""
        return text

    def end(self) -> Split:
        shown = "" if self._has_call else self._shown(self._calls.end())
        rest = self.close()
        return (shown, rest) if self._has_call else (shown + rest, "")

    def _shown(self, parts: Sequence[Part]) -> str:
        texts = []
        for part in parts:
            if not isinstance(part, TextDelta):
                self._has_call = True
                break
            texts.append(part.text)
        shown = "".join(texts)
        self._text = self._text[len(shown) :]
        return shown


class ReasonedAnswer:
    """An `AnswerParser`.  unclosed: None where a call in the reasoning is a thought in any case."""

    def __init__(
        self,
        thinking: ThinkTags | None,
        calls: CallParser | None,
        *,
        unclosed: UnclosedReasoning | None = None,
        markers: frozenset[str] = PlainText.markers,
        shows_reasoning: bool = True,
    ) -> None:
        self.markers = markers | {OPEN, CLOSE} if thinking is not None else markers
        self._thinking = thinking
        self._calls = PlainText() if calls is None else calls
        self._unclosed = unclosed
        self._shows_reasoning = shows_reasoning
        self._has_begun = False  # the answer: white space between reasoning and answer is dropped

    @property
    def is_reasoning(self) -> bool:
        return self._thinking is not None and self._thinking.is_reasoning

    def feed(self, text: str) -> Sequence[Part]:
        if self._thinking is None:
            return self._calls.feed(text)
        reasoning, answer = self._thinking.feed(text)
        if self._unclosed is not None:
            reasoning = self._unclosed.feed(reasoning)
            reasoning += "" if self._thinking.is_reasoning else self._unclosed.close()
        return [*self._reasoned(reasoning), *self._calls.feed(self._begun(answer))]

    def end(self) -> Sequence[Part]:
        if self._thinking is None:
            return self._calls.end()
        was_closed = not self._thinking.is_reasoning
        reasoning, answer = self._thinking.end()
        if self._unclosed is not None and not was_closed:
            certain = self._unclosed.feed(reasoning)
            rest, answer = self._unclosed.end()
            reasoning = certain + rest
        parts = self._calls.feed(self._begun(answer))
        return [*self._reasoned(reasoning), *parts, *self._calls.end()]

    def _reasoned(self, text: str) -> list[Part]:
        return [ReasoningDelta(text)] if text and self._shows_reasoning else []

    def _begun(self, text: str) -> str:
        if not self._has_begun and self._thinking is not None and self._thinking.has_reasoned:
            text = text.lstrip()
        self._has_begun = self._has_begun or bool(text)
        return text
