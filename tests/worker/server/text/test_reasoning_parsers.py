"""Text between think tags is separated from the answer, however the text is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.server.text.events import Delta, WholeAnswer, assembled
from pdcluster_worker.server.text.reasoning import (
    ReasonedAnswer,
    Start,
    ThinkTags,
    UnclosedReasoning,
    reasoning_parser_for,
    start_for,
    start_within,
)
from pdcluster_worker.server.tools.registry import FORMS
from pdcluster_worker.server.tools.streamed_call import Numbering
from tests.worker.server.recorded_calls import HERMES_NOW, TOOLS
from tests.worker.server.tools.parsing import called, cut

QWEN3 = "{%- if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
R1 = "<\uff5cAssistant\uff5c><think>\n {% if '</think>' in content %}"


def parsed(
    start: Start,
    pieces: list[str],
    *,
    shows: bool = True,
    has_tools: bool = False,
    form: str = "hermes",
) -> WholeAnswer:
    calls, probe = (FORMS[form].parser(TOOLS, Numbering(lambda: "call")) for _ in range(2))
    unclosed = UnclosedReasoning(probe) if has_tools else None
    parser = ReasonedAnswer(
        ThinkTags(start), calls if has_tools else None, unclosed=unclosed, shows_reasoning=shows
    )
    parts = [*(part for piece in pieces for part in parser.feed(piece)), *parser.end()]
    return assembled([Delta(0, tuple(parts), finish_reason="stop")])


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "answer"),
    [
        ("inside", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("inside", "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        ("inside", "\n\n</think>\n\nYes.", "", "Yes."),
        ("inside", "Hm, and it never ends", "Hm, and it never ends", ""),
        ("inside", "a </thin", "a </thin", ""),
        ("before", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("before", "\n<think>Hm.</think> Yes.", "Hm.", "Yes."),
        ("before", "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
        ("before", "  Yes.", "", "  Yes."),
        ("before", "<thi", "", "<thi"),
        ("before", "", "", ""),
        ("answer", "Yes.</think>\n", "", "Yes.</think>\n"),
        ("inside", "a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_reasoning_and_answer(start, text, reasoning, answer) -> None:
    for pieces in ([text], list(text)):
        got = parsed(start, pieces)
        assert (got.reasoning, got.text) == (reasoning, answer)


@given(
    st.sampled_from(["inside", "before", "answer"]),
    st.lists(
        st.sampled_from(["<think>", "</think>", "\n", " ", "a", "<", "</thi", HERMES_NOW]),
        max_size=8,
    ).map("".join),
    st.lists(st.integers(0, 200), max_size=10),
)
def test_any_cut_gives_the_same(start, text, places) -> None:
    assert parsed(start, cut(text, places), has_tools=True) == parsed(start, [text], has_tools=True)


def test_reasoning_that_is_left_out_is_not_in_the_text_either() -> None:
    got = parsed("inside", ["Hm.</think>\nYes."], shows=False)

    assert (got.reasoning, got.text) == ("", "Yes.")


def test_calls_come_after_the_reasoning_and_those_within_it_are_thoughts() -> None:
    got = parsed("inside", [f"Shall I {HERMES_NOW}?</think>\n\n{HERMES_NOW}"], has_tools=True)

    assert (got.reasoning, got.text) == (f"Shall I {HERMES_NOW}?", "")
    assert called(got) == (("now", {}),)


@pytest.mark.parametrize(
    ("form", "text", "reasoning", "answer"),
    [
        ("hermes", f"Shall I?\n\n{HERMES_NOW}", "Shall I?", ""),
        ("hermes", f"<think>\n{HERMES_NOW}", "", ""),
        (
            "hermes",
            f"Hm. <tool_call>no</tool_call> {HERMES_NOW}\nSo.",
            "Hm. <tool_call>no</tool_call>",
            "So.",
        ),
        ("hermes", f"a{HERMES_NOW.removesuffix('</tool_call>')}", "a", ""),
        ("mistral", "So [TOOL_CALLS]now[ARGS]{}", "So", ""),
        ("qwen3_coder", "So\n<function=now>\n</function>\n", "So", ""),
        ("llama3_json", '{"name": "now", "parameters": {}}', "", ""),
        ("pythonic", "\n[now()]", "", ""),
    ],
)
def test_a_call_in_reasoning_that_is_never_closed_is_one(form, text, reasoning, answer) -> None:
    for pieces in ([text], list(text)):
        got = parsed("inside", pieces, has_tools=True, form=form)
        assert (got.reasoning, got.text, called(got)) == (reasoning, answer, (("now", {}),))
        hidden = parsed("inside", pieces, has_tools=True, form=form, shows=False)
        assert (hidden.reasoning, hidden.text, called(hidden)) == ("", answer, (("now", {}),))


@pytest.mark.parametrize("text", ["<tool_call>x", '<tool_call>{"name": "launch"}</tool_call> so'])
def test_what_is_no_call_in_reasoning_that_is_never_closed_stays_a_thought(text) -> None:
    for pieces in ([text], list(text)):
        got = parsed("inside", pieces, has_tools=True)
        assert (got.reasoning, got.text, got.tool_calls) == (text, "", ())


def test_reasoning_is_given_out_as_it_comes_up_to_a_call() -> None:
    calls, probe = (FORMS["hermes"].parser(TOOLS, Numbering(lambda: "call")) for _ in range(2))
    parser = ReasonedAnswer(ThinkTags("inside"), calls, unclosed=UnclosedReasoning(probe))
    pieces = ["Let", " me", HERMES_NOW, " or", " not?</think>No."]
    shown = [[part.text for part in parser.feed(piece)] for piece in pieces]

    assert shown == [["Let"], [" me"], [], [], [f"{HERMES_NOW} or not?", "No."]]


@pytest.mark.parametrize(
    ("name", "prompt", "start"),
    [
        ("qwen3", "<|im_start|>assistant\n", "before"),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "inside"),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "answer"),
        ("deepseek_r1", "<\uff5cAssistant\uff5c>", "inside"),
        ("deepseek_r1", "<\uff5cAssistant\uff5c><think>\n", "inside"),
        ("deepseek_r1", "<\uff5cAssistant\uff5c></think>", "answer"),
    ],
)
def test_where_an_answer_begins_is_seen_in_the_prompt(name, prompt, start) -> None:
    assert start_for(name, prompt) == start


def test_an_answer_that_goes_on_begins_where_the_message_ends() -> None:
    assert [start_within(text) for text in ("<think>Hm", "<think>Hm</think>So", "So")] == [
        "inside",
        "answer",
        "answer",
    ]


def test_a_parser_is_found_from_the_template() -> None:
    assert [
        reasoning_parser_for("auto", template) for template in (QWEN3, R1, "{{ messages }}")
    ] == ["qwen3", "deepseek_r1", None]
    assert [reasoning_parser_for(name, QWEN3) for name in ("none", "deepseek_r1")] == [
        None,
        "deepseek_r1",
    ]
