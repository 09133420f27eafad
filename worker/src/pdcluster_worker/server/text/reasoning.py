"""Separates the text between think tags from the answer.  Without a tag in the prompt, `qwen3`
looks for an opening one and takes text without it for the answer; `deepseek_r1`, whose model may
leave it out, for reasoning.
"""

from dataclasses import dataclass
from typing import Literal

from pdcluster_worker.config.worker import ReasoningParserName
from pdcluster_worker.server.text.partial_match import TrailingSpace, held_back

OPEN, CLOSE = "<think>", "</think>"

Start = Literal["inside", "before", "answer"]
"""Place at which an answer begins: in reasoning, where an opening tag may come, or after all
reasoning.
"""


def start_of(prompt: str, *, assumes_open: bool) -> Start:
    """Beginning of an answer to this prompt.  assumes_open: text without an opening tag is
    reasoning too.

    >>> start_of("<|assistant|><think>", assumes_open=False)
    'inside'
    >>> start_of("<|assistant|><think></think>", assumes_open=True)
    'answer'
    """
    end = prompt.rstrip()
    if end.endswith(OPEN):
        return "inside"
    if end.endswith(CLOSE):
        return "answer"
    return "inside" if assumes_open else "before"


def start_within(message: str) -> Start:
    return "inside" if message.rfind(OPEN) > message.rfind(CLOSE) else "answer"


@dataclass(slots=True)
class Split:
    reasoning: str
    answer: str


class ThinkTags:
    def __init__(self, start: Start) -> None:
        self._state: Start = start
        self._text = ""
        # at the end of the reasoning so far: dropped if that is its end
        self._space = TrailingSpace(drops=True)

    @property
    def is_reasoning(self) -> bool:
        return self._state == "inside"

    def feed(self, text: str) -> Split:
        if self._state == "answer":
            return Split("", text)
        self._text += text
        if self._state == "before":
            return self._before()
        return self._inside()

    def end(self) -> Split:
        if self._state == "inside":
            return Split(self._space.shown(self._taken("inside")) + self._space.rest(), "")
        return Split("", self._taken("answer"))

    def _before(self) -> Split:
        start = self._text.lstrip()
        if start.startswith(OPEN):
            self._state, self._text = "inside", start[len(OPEN) :]
            return self._inside()
        return Split("", "" if OPEN.startswith(start) else self._taken("answer"))

    def _inside(self) -> Split:
        before, tag, after = self._text.partition(CLOSE)
        if tag:
            self._state, self._text = "answer", ""
            return Split(self._space.shown(self._opened(before)), after)
        certain = len(self._text) - held_back(self._text, [OPEN, CLOSE])
        text, self._text = self._text[:certain], self._text[certain:]
        return Split(self._space.shown(self._opened(text)), "")

    def _opened(self, text: str) -> str:
        """A model may write the opening tag although the prompt has one."""
        while self._space.drops and (start := text.lstrip()).startswith(OPEN):
            text = start[len(OPEN) :]
        return text

    def _taken(self, state: Start) -> str:
        text, self._text, self._state = self._text, "", state
        return text


ReasoningName = Literal["deepseek_r1", "qwen3"]


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
    return start_of(prompt, assumes_open=name == "deepseek_r1")
