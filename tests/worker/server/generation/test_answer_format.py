"""Texts that the constraint on a whole answer allows, by the grammar library itself."""

from pathlib import Path

import numpy as np
import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.requests import MAX_CONSTRAINT_CHARACTERS, Constraint
from pdcluster_worker.server.generation.answer_format import (
    NO_PARAMETERS,
    Reasoning,
    ToolUse,
    answer_constraint,
)
from pdcluster_worker.server.text.tokenizer import Tokenizer
from pdcluster_worker.server.tools.calls import Tool
from pdcluster_worker.structured_output.compiler import ConstraintCompiler
from pdcluster_worker.structured_output.lark import FormError
from pdcluster_worker.structured_output.matcher import Matcher
from tests.worker.server.recorded_calls import HERMES_NOW, HERMES_PARIS

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"type": "string"}},
}
TOOLS = {
    "get_weather": Tool("get_weather", CITY, is_strict=True),
    "now": Tool("now", NO_PARAMETERS),
}
NONE = ToolUse("none", {})
AUTO, REQUIRED, ONE = (
    ToolUse("auto", TOOLS),
    ToolUse("required", TOOLS),
    ToolUse("required", TOOLS, most=1),
)
NAMED = ToolUse("named", {"get_weather": TOOLS["get_weather"]}, "get_weather", most=1)
JSON = Constraint(
    "json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
)
ANSWER = Reasoning()
INSIDE, BEFORE = Reasoning("inside", 3), Reasoning("before", 3)


END = 258


class Grammar:
    """Constraints over the bytes of the tests' tokenizer; 258 ends an answer."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.load(folder)
        self._tokens = [*(tokenizer.token_bytes(i) for i in range(257)), b"<|im_start|>", b""]
        self._forms = ConstraintCompiler(self._tokens)

    def matcher(self, constraint: Constraint | None) -> Matcher:
        assert constraint is not None
        assert constraint.kind == "structural_tag"
        return Matcher(self._forms.compile(constraint), [END])

    def takes(self, constraint: Constraint | None, text: str) -> bool:
        """Return whether an answer may be this text and end after it."""
        matcher = self.matcher(constraint)
        for token_id in [*self.ids(text), END]:
            if token_id not in self.allowed_ids(matcher):
                return False
            matcher.feed([token_id])
        return True

    def ids(self, text: str) -> list[int]:
        """One token for each byte."""
        return [self._tokens.index(bytes([byte])) for byte in text.encode()]

    def allowed(self, matcher: Matcher) -> list[bytes]:
        """The tokens that may come next: budgets count in the mask alone."""
        return [self._tokens[token_id] for token_id in self.allowed_ids(matcher)]

    def allowed_ids(self, matcher: Matcher) -> list[int]:
        words = np.empty(-(-(len(self._tokens) + 1) // 32), dtype=np.uint32)
        assert matcher.fill(words)
        bits = np.unpackbits(words.view(np.uint8), count=len(self._tokens), bitorder="little")
        return [int(token_id) for token_id in np.flatnonzero(bits)]


@pytest.fixture(scope="module")
def grammar(model_folder: Path) -> Grammar:
    return Grammar(model_folder)


PARIS = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
CALL_NOW = '{"name": "now", "parameters": {}}'
CODER = "<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
CODER += "</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("use", "parser", "requested", "right", "wrong"),
    [
        (
            REQUIRED,
            None,
            None,
            [f"[{PARIS}]", f"[{PARIS}, {CALL_NOW}]"],
            [
                "[]",
                "",
                "Sure",
                '[{"name": "launch", "parameters": {}}]',
                '[{"name": "get_weather", "parameters": {}}]',
                f"[{PARIS}",
            ],
        ),
        (ONE, None, None, [f"[{PARIS}]", f"[{CALL_NOW}]"], [f"[{PARIS}, {CALL_NOW}]"]),
        (
            AUTO,
            "hermes",
            None,
            ["Hello.", HERMES_PARIS, f"So. {HERMES_PARIS}\n{HERMES_NOW} Done."],
            [
                HERMES_PARIS.replace('"Paris"', "3"),
                HERMES_PARIS.replace("city", "town"),
                HERMES_NOW.replace("now", "launch"),
            ],
        ),
        (
            AUTO,
            "qwen3_coder",
            None,
            ["Hello.", CODER],
            [CODER.replace("city", "town"), CODER.replace("get_weather", "launch")],
        ),
        (
            AUTO,
            "hermes",
            JSON,
            ['{"a": 1}', HERMES_PARIS, f"{HERMES_PARIS}\n{HERMES_NOW}"],
            ["Hello.", '{"a": "x"}', f'{HERMES_NOW}{{"a": 1}}'],
        ),
        (
            AUTO,
            "llama3_json",
            JSON,
            ['{"a": 1}', PARIS, f"{PARIS}; {CALL_NOW}"],
            ["Hello.", '{"name": "launch", "parameters": {}}'],
        ),
    ],
)
def test_calls_have_the_requested_form(grammar, use, parser, requested, right, wrong) -> None:
    constraint = answer_constraint(requested, use, parser, ANSWER)

    assert [text for text in right if not grammar.takes(constraint, text)] == []
    assert [text for text in wrong if grammar.takes(constraint, text)] == []


def test_a_bounded_text_of_a_call_does_not_hold_its_end(grammar) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20}}}
    use = ToolUse("auto", {"f": Tool("f", schema, is_strict=True)})
    constraint = answer_constraint(None, use, "qwen3_coder", ANSWER)
    call = "<tool_call>\n<function=f>\n<parameter=a>{}</parameter>\n</function>\n</tool_call>"

    assert grammar.takes(constraint, call.format("\nb c\n"))
    assert not grammar.takes(constraint, call.format("b</parameter>c"))
    assert not grammar.takes(constraint, call.format(23 * "b"))


def test_a_named_call_is_its_parameters(grammar) -> None:
    constraint = answer_constraint(None, NAMED, None, ANSWER)

    assert grammar.takes(constraint, '{"city": "Paris"}')
    assert not grammar.takes(constraint, '{"town": "Paris"}')


@pytest.mark.parametrize(
    ("use", "requested", "reasoning", "right", "wrong"),
    [
        (
            NONE,
            None,
            INSIDE,
            ["ab</think>Yes.", "abc</think>\n\nYes.", "</think>"],
            ["abcd</think>Yes.", "abcd", "abc"],
        ),
        (
            NONE,
            None,
            BEFORE,
            ["<think>ab</think>Yes.", "Yes.", "<think>abc</think>"],
            ["<think>abcd</think>Yes.", "Yes.<think>"],
        ),
        (NONE, None, Reasoning("inside", 0), ["</think>Yes."], ["a</think>"]),
        (
            NONE,
            JSON,
            Reasoning("inside"),
            ['a long thought</think>\n\n{"a": 1}', '</think>{"a": 1}'],
            ["so</think>Yes.", '{"a": 1}'],
        ),
        (
            NONE,
            JSON,
            Reasoning("before"),
            ['<think>so</think>{"a": 1}', '{"a": 1}'],
            ["<think>so</think>Yes.", "Yes."],
        ),
        (NONE, JSON, INSIDE, ['abc</think>\n{"a": 1}'], ['abcd</think>{"a": 1}']),
        (
            REQUIRED,
            None,
            Reasoning("inside"),
            [f"so</think>[{PARIS}]"],
            [f"[{PARIS}]", "so</think>Yes."],
        ),
        (
            NAMED,
            None,
            Reasoning("before"),
            ['<think>so</think>{"city": "P"}', '{"city": "P"}'],
            ["<think>so</think>Yes."],
        ),
        (
            NONE,
            Constraint("choice", '["a","b"]'),
            Reasoning("inside"),
            ["so</think>a", "so</think>b"],
            ["so</think>c"],
        ),
        (NONE, Constraint("regex", "x+"), Reasoning("inside"), ["so</think>xx"], ["so</think>c"]),
        (
            NONE,
            Constraint("grammar", 'root ::= "x" | "y"'),
            Reasoning("inside"),
            ["so</think>y"],
            ["so</think>c"],
        ),
        (
            NONE,
            Constraint("json_object"),
            Reasoning("inside"),
            ['so</think>{"b": []}'],
            ["so</think>[]"],
        ),
    ],
)
def test_the_form_begins_after_the_reasoning_which_has_a_budget(
    grammar, use, requested, reasoning, right, wrong
) -> None:
    constraint = answer_constraint(requested, use, "hermes", reasoning)

    assert [text for text in right if not grammar.takes(constraint, text)] == []
    assert [text for text in wrong if grammar.takes(constraint, text)] == []


def test_a_budget_counts_tokens_that_are_fed_again(grammar) -> None:
    """As after a preemption or a move: no mask is made for them."""
    matcher = grammar.matcher(answer_constraint(None, NONE, None, INSIDE))
    matcher.feed(grammar.ids("abc"))

    assert grammar.allowed(matcher) == [b"<"]


def test_what_needs_no_constraint_of_ours_is_left_as_it_is() -> None:
    lenient = ToolUse("auto", {"now": TOOLS["now"]})

    assert answer_constraint(None, lenient, "hermes", ANSWER) is None
    assert answer_constraint(None, AUTO, "pythonic", ANSWER) is None
    assert answer_constraint(JSON, NONE, "hermes", ANSWER) is JSON
    assert answer_constraint(None, NONE, None, Reasoning("answer", 5)) is None
    assert answer_constraint(None, NONE, None, Reasoning("inside")) is None


def test_a_strict_schema_is_strict_also_after_reasoning(grammar) -> None:
    strict = Constraint("json_schema", '{"uniqueItems":true}', strict=True)
    made = answer_constraint(strict, NONE, None, Reasoning("inside"))

    assert made is not None
    with pytest.raises(FormError, match="uniqueItems: cannot be enforced"):
        grammar.matcher(made)


def test_schemas_that_are_too_large_together_are_refused() -> None:
    big = Tool("big", {"type": "object", "description": "x" * MAX_CONSTRAINT_CHARACTERS})

    with pytest.raises(RequestError, match="send fewer tools"):
        answer_constraint(None, ToolUse("required", {"big": big}), None, ANSWER)
