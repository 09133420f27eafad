"""A choice's tokens become parts, and parts become OpenAI's messages and deltas."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from pdcluster_worker.messages.requests import Token
from pdcluster_worker.server.generation.choice import AnswerRules, Choice
from pdcluster_worker.server.openai.completions import added_by
from pdcluster_worker.server.text.events import (
    ArgumentsDelta,
    Delta,
    Part,
    ReasoningDelta,
    ToolCall,
    ToolCallBegin,
    ToolCallEnd,
    WholeAnswer,
    assembled,
)
from pdcluster_worker.server.text.tokenizer import Tokenizer

CALL = (
    ToolCallBegin(0, "call_a", "add"),
    ArgumentsDelta(0, '{"x":'),
    ArgumentsDelta(0, "1}"),
    ToolCallEnd(0),
)


class Scripted:
    """Reasons up to the first "#", and then calls `add` with the rest."""

    markers = frozenset({"<|im_start|>"})

    def __init__(self) -> None:
        self.is_reasoning = True
        self._text = ""

    def feed(self, text: str) -> Sequence[Part]:
        before, mark, after = text.partition("#") if self.is_reasoning else ("", "", text)
        self.is_reasoning = self.is_reasoning and not mark
        self._text += after
        return (ReasoningDelta(before),) if before else ()

    def end(self) -> Sequence[Part]:
        return (
            (ToolCallBegin(0, "call_a", "add"), ArgumentsDelta(0, self._text), ToolCallEnd(0))
            if self._text
            else ()
        )


@pytest.fixture
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


def fed(
    tokenizer: Tokenizer, text: str, reason: str = "stop", **rules: bool
) -> tuple[Choice, list[Delta]]:
    choice = Choice(2, tokenizer, AnswerRules(new_parser=Scripted, **rules))
    ids = [tokenizer._tokenizer.encode(character).ids[0] for character in text]
    deltas = [choice.feed(Token("r", i)) for i in ids]
    return choice, [*deltas, choice.feed(Token("r", 258, finish_reason=reason))]


def test_a_choice_gives_the_parsers_parts_and_counts_reasoning(tokenizer) -> None:
    choice, deltas = fed(tokenizer, "ab#{}")

    assert [delta.parts for delta in deltas[:2]] == [(ReasoningDelta("a"),), (ReasoningDelta("b"),)]
    assert assembled(deltas) == WholeAnswer(
        "", "ab", (ToolCall("call_a", "add", "{}"),), "tool_calls"
    )
    assert (choice.num_tokens, choice.num_reasoning_tokens) == (6, 3)


def test_a_choice_cut_by_length_or_with_a_named_tool_ends_by_another_reason(tokenizer) -> None:
    assert fed(tokenizer, "a#{}", "length")[0].finish_reason == "length"
    assert fed(tokenizer, "a#{}", ends_by_calls=False)[0].finish_reason == "stop"
    assert fed(tokenizer, "a#")[0].finish_reason == "stop"


def test_a_stop_string_ends_the_text_before_it_is_split(tokenizer) -> None:
    choice = Choice(0, tokenizer, AnswerRules(stop=("}x",), new_parser=Scripted))
    deltas = [
        choice.feed(Token("r", tokenizer._tokenizer.encode(character).ids[0]))
        for character in "a#{}x"
    ]

    assert assembled(deltas) == WholeAnswer(
        "", "a", (ToolCall("call_a", "add", "{"),), "tool_calls"
    )


def test_a_parser_sees_the_control_tokens_that_it_names(tokenizer) -> None:
    choice = Choice(0, tokenizer, AnswerRules(new_parser=Scripted))

    assert choice.feed(Token("r", 257)).parts == (ReasoningDelta("<|im_start|>"),)
    assert choice.feed(Token("r", 258)).parts == ()


def test_the_first_delta_says_the_role_also_with_a_call_or_reasoning() -> None:
    first = [
        added_by(Delta(0, parts, is_first=True)) for parts in ((), (ReasoningDelta("h"),), CALL[:1])
    ]

    assert [each["role"] for each in first if each] == ["assistant"] * 3
    assert [each.get("content") for each in first if each] == ["", None, None]
