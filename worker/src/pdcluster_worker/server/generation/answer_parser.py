"""The parser of one choice: reasoning first, then text and calls of tools."""

from collections.abc import Sequence

from pdcluster_worker.server.reasoning.think import CLOSE, OPEN, Split, ThinkTags
from pdcluster_worker.server.text.events import Part, PlainText
from pdcluster_worker.server.tools.registry import CallParser

_NO_MARKERS: frozenset[str] = frozenset()


class ReasonedAnswer:
    """An `events.AnswerParser` of two stages.

    thinking:         None where the model does not reason.
    calls:            None where the answer is text alone.
    shows_reasoning:  whether the parts hold it; it is taken out of the text in any case.
    """

    def __init__(
        self,
        thinking: ThinkTags | None,
        calls: CallParser | None,
        *,
        markers: frozenset[str] = _NO_MARKERS,
        shows_reasoning: bool = True,
    ) -> None:
        self.markers = markers | {OPEN, CLOSE} if thinking is not None else markers
        self._thinking = thinking
        self._calls: CallParser = PlainText() if calls is None else calls
        self._shows_reasoning = shows_reasoning
        self._has_reasoned = False
        self._has_begun = False  # the answer: white space between reasoning and answer is dropped

    @property
    def is_reasoning(self) -> bool:
        """True if the text that comes next is reasoning."""
        return self._thinking is not None and self._thinking.is_reasoning

    def feed(self, text: str) -> Sequence[Part]:
        """Take more text."""
        if self._thinking is None:
            return self._calls.feed(text)
        self._has_reasoned = self._has_reasoned or self._thinking.is_reasoning
        split = self._thinking.feed(text)
        self._has_reasoned = (
            self._has_reasoned or self._thinking.is_reasoning or bool(split.reasoning)
        )
        return self._joined(split, self._calls.feed(self._answer(split.answer)))

    def end(self) -> Sequence[Part]:
        """No more text."""
        if self._thinking is None:
            return self._calls.end()
        split = self._thinking.end()
        return self._joined(
            split, [*self._calls.feed(self._answer(split.answer)), *self._calls.end()]
        )

    def _answer(self, text: str) -> str:
        if not self._has_begun and self._has_reasoned:
            text = text.lstrip()
        self._has_begun = self._has_begun or bool(text)
        return text

    def _joined(self, split: Split, parts: Sequence[Part]) -> list[Part]:
        reasoning = split.reasoning if self._shows_reasoning else []
        return [*reasoning, *parts]
