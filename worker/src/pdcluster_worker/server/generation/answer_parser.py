"""The parser of one choice: reasoning first, then text and calls of tools."""

from collections.abc import Sequence

from pdcluster_worker.server.text.events import Part, PlainText, ReasoningDelta, TextDelta
from pdcluster_worker.server.text.reasoning import CLOSE, OPEN, Split, ThinkTags
from pdcluster_worker.server.tools.registry import CallParser

_NO_MARKERS: frozenset[str] = frozenset()


class UnclosedReasoning:
    """Reasoning that may never be closed, whose text waits from the first call on: that is a call
    then.
    """

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

    def end(self) -> tuple[str, str]:
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
    """unclosed: None where a call in the reasoning is a thought in any case."""

    def __init__(
        self,
        thinking: ThinkTags | None,
        calls: CallParser | None,
        *,
        unclosed: UnclosedReasoning | None = None,
        markers: frozenset[str] = _NO_MARKERS,
        shows_reasoning: bool = True,
    ) -> None:
        self.markers = markers | {OPEN, CLOSE} if thinking is not None else markers
        self._thinking = thinking
        self._calls: CallParser = PlainText() if calls is None else calls
        self._unclosed = unclosed
        self._shows_reasoning = shows_reasoning
        self._has_reasoned = False
        self._has_begun = False  # the answer: white space between reasoning and answer is dropped

    @property
    def is_reasoning(self) -> bool:
        return self._thinking is not None and self._thinking.is_reasoning

    def feed(self, text: str) -> Sequence[Part]:
        if self._thinking is None:
            return self._calls.feed(text)
        self._has_reasoned = self._has_reasoned or self._thinking.is_reasoning
        split = self._thinking.feed(text)
        self._has_reasoned = (
            self._has_reasoned or self._thinking.is_reasoning or bool(split.reasoning)
        )
        if self._unclosed is not None:
            certain = self._unclosed.feed(split.reasoning)
            closed = "" if self._thinking.is_reasoning else self._unclosed.close()
            split = Split(certain + closed, split.answer)
        return self._joined(split, self._calls.feed(self._answer(split.answer)))

    def end(self) -> Sequence[Part]:
        if self._thinking is None:
            return self._calls.end()
        is_closed = not self._thinking.is_reasoning
        split = self._thinking.end()
        if self._unclosed is not None and not is_closed:
            certain = self._unclosed.feed(split.reasoning)
            rest, answer = self._unclosed.end()
            split = Split(certain + rest, answer)
        return self._joined(
            split, [*self._calls.feed(self._answer(split.answer)), *self._calls.end()]
        )

    def _answer(self, text: str) -> str:
        if not self._has_begun and self._has_reasoned:
            text = text.lstrip()
        self._has_begun = self._has_begun or bool(text)
        return text

    def _joined(self, split: Split, parts: Sequence[Part]) -> list[Part]:
        if not split.reasoning or not self._shows_reasoning:
            return [*parts]
        return [ReasoningDelta(split.reasoning), *parts]
