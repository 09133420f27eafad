"""Calls of tools in a model's text: every form, however the text is cut into pieces."""

import time
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_worker.server.text.events import (
    ArgumentsDelta,
    Delta,
    Part,
    ToolCallBegin,
    ToolCallEnd,
    WholeAnswer,
    assembled,
)
from pdcluster_worker.server.tools.calls import MAX_CALL_CHARACTERS
from pdcluster_worker.server.tools.registry import FORMS, CallParser, parser_for
from pdcluster_worker.server.tools.streamed_call import NamedCall, Numbering, RequiredCalls
from tests.worker.server.recorded_calls import (
    HERMES_NOW,
    HERMES_PARIS,
    MALFORMED,
    RECORDED,
    TOOLS,
    Recorded,
)
from tests.worker.server.tools.parsing import called, cut

FORCED = (
    '[{"name": "get_weather", "parameters": {"city": "a\\"}]{", "where": {"x": [{}]}}}, {"name": '
    '"now", "parameters": {}}]'
)


def numbering(most: int | None = None) -> Numbering:
    ids = count()
    return Numbering(lambda: f"call_{next(ids)}", most)


def parser_of(name: str, most: int | None = None) -> CallParser:
    return FORMS[name].parser(TOOLS, numbering(most))


def parts_of(parser: CallParser, pieces: Sequence[str]) -> list[Part]:
    return [*(part for piece in pieces for part in parser.feed(piece)), *parser.end()]


def answer_of(parser: CallParser, pieces: Sequence[str]) -> WholeAnswer:
    return assembled([Delta(0, tuple(parts_of(parser, pieces)), finish_reason="stop")])


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"{case.parser}-{case.output[:30]!r}")
def test_calls_are_read_whole_and_letter_by_letter(case: Recorded) -> None:
    for pieces in ([case.output], list(case.output)):
        answer = answer_of(parser_of(case.parser), pieces)
        assert (called(answer), answer.text) == (case.calls, case.text)
        assert [call.call_id for call in answer.tool_calls] == [
            f"call_{number}" for number in range(len(case.calls))
        ]


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: f"{case.parser}-{case.output[:30]!r}")
def test_what_is_no_call_stays_text(case: Recorded) -> None:
    answer = answer_of(parser_of(case.parser), [case.output])

    assert (answer.tool_calls, answer.text) == ((), case.output)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_cut_of_any_text_gives_the_same(data) -> None:
    name = data.draw(st.sampled_from(sorted(FORMS)))
    known = [
        case.output
        for case in (*RECORDED, *MALFORMED)
        if case.parser == name and len(case.output) < 400
    ]
    pieces = st.one_of(
        st.sampled_from([*known, HERMES_NOW]),
        st.text(alphabet="<tool_cal>/[]{}\n a\"'", max_size=8),
    )
    text = "".join(data.draw(st.lists(pieces, max_size=4)))
    whole = answer_of(parser_of(name), [text])

    assert (
        answer_of(
            parser_of(name), cut(text, data.draw(st.lists(st.integers(0, 2000), max_size=12)))
        )
        == whole
    )
    assert answer_of(parser_of(name), list(text)) == whole


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=10), st.integers(0, len(FORCED)))
def test_any_cut_of_forced_calls_gives_the_same(places, length) -> None:
    text = FORCED[:length]
    for make in (lambda: RequiredCalls(TOOLS, numbering()), lambda: NamedCall("now", numbering(1))):
        assert answer_of(make(), cut(text, places)) == answer_of(make(), [text])


HELD = [
    case
    for case in RECORDED
    if case.parser == "hermes"
    and not case.text.startswith("<")
    and case.output.count('<tool_call>\n{"name": ') == len(case.calls) > 0
    and case.output.count("}\n</tool_call>") == len(case.calls)
]
"""In the form that the grammar has."""


def held_parser(most: int | None = None) -> CallParser:
    return FORMS["hermes"].parser(TOOLS, numbering(most), is_constrained=True)


@pytest.mark.parametrize("case", HELD, ids=lambda case: f"{case.output[:30]!r}")
def test_calls_that_are_held_to_their_form_are_the_same_however_they_are_cut(case) -> None:
    whole = answer_of(held_parser(), [case.output])
    assert (called(whole), whole.text) == (case.calls, case.text)
    for place in range(len(case.output) + 1):
        assert answer_of(held_parser(), cut(case.output, [place])) == whole
    parts = parts_of(held_parser(), list(case.output))
    assert assembled([Delta(0, tuple(parts), finish_reason="stop")]) == whole
    assert sum(isinstance(part, ArgumentsDelta) for part in parts) >= 2 * len(case.calls)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.integers(0, 400))
def test_nothing_of_a_held_call_is_taken_back(shorter, longer) -> None:
    text = f"So.\n{HERMES_PARIS}\n{HERMES_NOW}\nDone."
    early, late = sorted((shorter, longer))
    before, after = (
        assembled([Delta(0, tuple(held_parser().feed(text[:end])), finish_reason="length")])
        for end in (early, late)
    )

    assert after.text.startswith(before.text)
    for old, new in zip(before.tool_calls, after.tool_calls, strict=False):
        assert (new.call_id, new.name) == (old.call_id, old.name)
        assert new.arguments.startswith(old.arguments)
    assert len(after.tool_calls) >= len(before.tool_calls)


def test_a_held_call_that_is_cut_off_has_no_end() -> None:
    parts = parts_of(held_parser(), [HERMES_PARIS[: HERMES_PARIS.index("ris")]])

    assert [type(part) for part in parts] == [ToolCallBegin, ArgumentsDelta]
    assert parts[1].text == '{"city": "Pa'


def test_text_before_a_call_is_shown_at_once_and_white_space_next_to_it_is_dropped() -> None:
    parser = parser_of("hermes")
    shown = [
        parser.feed(piece)
        for piece in (
            "So",
            " ",
            "<tool",
            "box>",
            "\n\n",
            HERMES_PARIS,
            "\n ",
            HERMES_NOW,
            "\n",
            "Done",
        )
    ]

    assert [[getattr(part, "text", part) for part in parts] for parts in shown[:5]] == [
        ["So"],
        [],
        [],
        [" <toolbox>"],
        [],
    ]
    assert [len(parts) for parts in shown[5:]] == [3, 0, 3, 0, 1]


def test_one_call_alone_is_let_through_where_parallel_ones_are_off() -> None:
    for parser in (parser_of("hermes", most=1), held_parser(most=1)):
        answer = answer_of(parser, [HERMES_PARIS + HERMES_NOW + "Done"])
        assert ([call.name for call in answer.tool_calls], answer.text) == (["get_weather"], "Done")


def test_text_that_never_closes_is_let_go() -> None:
    text = "<tool_call>" + "x" * (MAX_CALL_CHARACTERS + 1)

    assert parts_of(parser_of("hermes"), [text, "y"])[0].text == text


def test_required_calls_come_in_pieces() -> None:
    parser = RequiredCalls(TOOLS, numbering())
    parts = parts_of(parser, cut(FORCED, range(0, len(FORCED), 7)))
    answer = assembled([Delta(0, tuple(parts), finish_reason="stop")])

    assert called(answer) == (("get_weather", {"city": 'a"}]{', "where": {"x": [{}]}}), ("now", {}))
    assert len(parts) > 8
    assert answer.text == ""


@pytest.mark.parametrize("length", range(1, len(FORCED)))
def test_required_calls_that_are_cut_off_have_no_end_and_no_text(length) -> None:
    answer_parts = parts_of(RequiredCalls(TOOLS, numbering()), [FORCED[:length]])
    answer = assembled([Delta(0, tuple(answer_parts), finish_reason="length")])

    assert answer.text == ""
    assert sum(isinstance(part, ToolCallEnd) for part in answer_parts) in (
        len(answer.tool_calls),
        len(answer.tool_calls) - 1,
    )


def test_what_is_no_array_of_calls_is_text() -> None:
    assert (
        answer_of(RequiredCalls(TOOLS, numbering()), ["Sorry, I cannot"]).text == "Sorry, I cannot"
    )
    assert answer_of(RequiredCalls(TOOLS, numbering()), ["  \n"]).text == ""


def test_a_named_call_is_its_arguments() -> None:
    whole, part, nothing = (
        parts_of(NamedCall("now", numbering(1)), pieces)
        for pieces in (['{"a"', ": 1}"], ['{"a": '], [])
    )

    assert called(assembled([Delta(0, tuple(whole), finish_reason="stop")])) == (("now", {"a": 1}),)
    assert isinstance(whole[-1], ToolCallEnd)
    assert not isinstance(part[-1], ToolCallEnd)
    assert nothing == []


TEMPLATES = {
    "hermes": '{%- if tools %}... <tool_call>\\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\\n</tool_call>",
    "qwen3_coder": "<tool_call>\\n<function=example_function_name>\\n"
    "<parameter=example_parameter_1>",
    "mistral": '{{- "[TOOL_CALLS] [" }}',
    "llama3_json": '<|start_header_id|> {"name": function name, "parameters": dictionary of '
    "argument name and its value}",
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...)]",
}


@pytest.mark.parametrize("name", FORMS)
def test_a_parser_is_found_from_the_template(name) -> None:
    assert parser_for("auto", TEMPLATES[name]) == name
    assert parser_for(name, "") == name
    assert parser_for("none", TEMPLATES[name]) is None


def test_qwen_is_hermes_and_an_unknown_template_has_no_parser() -> None:
    assert parser_for("qwen", "") == "hermes"
    assert parser_for("auto", "{{ messages }}") is None


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("mistral", "[TOOL_CALLS]now" + " " * 100_000 + "x"),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]" + " " * 100_000 + "x"),
        ("hermes", '<tool_call>{"' + "</tool_call>" * 80_000),
        ("hermes", '<tool_call>"</tool_call>' * 20_000),
        ("mistral", '[TOOL_CALLS]"' * 20_000),
        ("qwen3_coder", "<tool_call><parameter=x>" + "</tool_call>" * 80_000),
        ("qwen3_coder", "<tool_call><parameter=x></tool_call>" * 20_000 + "</parameter>"),
        ("qwen3_coder", "<function=now><parameter=x>" + "</function>" * 80_000 + "</parameter>!"),
        ("qwen3_coder", "<tool_call>" + "<function=now>" * 20_000),
        ("qwen3_coder", "<tool_call>" + "<function=" * 20_000 + "</function>"),
        ("qwen3_coder", "<tool_call><function=now>" + "<parameter=x>" * 20_000 + "</function>"),
    ],
)
def test_no_text_takes_long_to_be_read(name: str, output: str) -> None:
    start = time.process_time()
    answer = answer_of(parser_of(name), [output])

    assert answer.text == output
    assert time.process_time() - start < 1.0
