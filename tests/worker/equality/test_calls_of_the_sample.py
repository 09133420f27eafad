"""Calls and reasoning of the real sample model: well formed, also where a request goes on after a
move.

The model has 135 million parameters and was trained for neither: the constraint makes it.
"""

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import RequestSpec, Token
from pdcluster_worker.server.generation.chat_answer import ParserNames, model_parsers
from pdcluster_worker.server.generation.choice import Choice
from pdcluster_worker.server.generation.sampling import ModelLimits, specs_for
from pdcluster_worker.server.openai.own_front_end import prepare
from pdcluster_worker.server.schemas.requests import ChatRequest
from pdcluster_worker.server.text.events import WholeAnswer, assembled
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.chat_model import chat_model
from tests.worker.equality.engines import Model, Pair, engines_over

pytestmark = pytest.mark.model

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": CITY,
            "strict": True,
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
BUDGET = 6
MOST_TAG_TOKENS = 4
"""This model has no token for </think>: it is made of smaller ones."""

THINKS = {"thinking_token_budget": BUDGET}

CASES: dict[str, dict[str, Any]] = {
    "one required, drawn": {
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1.0,
    },
    "named": {"tools": TOOLS, "tool_choice": NAMED},
    "thinking, then JSON": {
        "messages": [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "<think>"},
        ],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"enum": ["yes", "no"]}},
        },
        **THINKS,
    },
}


class Sample:
    """The sample model, as its server sees a request and its engine runs it."""

    def __init__(self) -> None:
        folder = chat_model()
        self.tokenizer = Tokenizer.load(folder, "chatml-tools")
        self.model = Model(folder, num_blocks=128)

    async def spec(self, name: str) -> tuple[RequestSpec, Choice]:
        """One of the cases: what the engine gets, and what reads its answer."""
        fields = CASES[name]
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "How is Paris?"}],
            "max_tokens": 40,
            "temperature": 0,
            "seed": 3,
            **fields,
        }
        body["continue_final_message"] = body["messages"][-1]["role"] == "assistant"
        request = ChatRequest.model_validate(body)
        names = ParserNames(reasoning="qwen3" if "thinking" in name else "none")
        parsers = model_parsers(names, self.tokenizer.chat_template)
        prepared = prepare(SimpleNamespace(tokenizer=self.tokenizer, parsers=parsers), request)
        limits = ModelLimits(2048, 49152, self.tokenizer.eos_token_ids)
        specs = specs_for(
            request, prepared.sampling_request, prepared.prompts, limits, response_id=name
        )
        return specs[0][0], Choice(0, self.tokenizer, prepared.rules)

    def compile(self, spec: RequestSpec) -> None:
        """Wait until the constraint is compiled, so that a run never waits for it."""
        grammars, request = self.model.runner.grammars, EngineRequest.from_spec(spec, 0.0)
        grammars.begin(request)
        deadline = time.monotonic() + 60
        while (opened := grammars.open(request)) is not True:
            assert opened is False, opened
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def run(self, spec: RequestSpec) -> list[Token]:
        return Pair(*engines_over([self.model, self.model])).run([spec], remote=False)[0]


@pytest.fixture(scope="module")
def sample() -> Iterator[Sample]:
    made = Sample()
    yield made
    made.model.runner.close()


def read(choice: Choice, tokens: list[Token]) -> tuple[WholeAnswer, int]:
    return assembled([choice.feed(token) for token in tokens]), choice.num_reasoning_tokens


def check(name: str, answer: WholeAnswer, num_reasoning: int) -> None:
    """An answer has the form that was asked for, and so has each of its calls but one that was cut
    off.
    """
    whole = answer.tool_calls if answer.finish_reason != "length" else answer.tool_calls[:-1]
    for call in whole:
        assert set(json.loads(call.arguments)) == (
            {"city", "days"} if call.name == "get_weather" else set()
        )
    if "thinking" not in name:
        assert whole
        assert len(answer.tool_calls) == 1
        assert (answer.text, answer.reasoning) == ("", "")
        return
    assert answer.reasoning
    assert num_reasoning <= BUDGET + MOST_TAG_TOKENS
    assert "</think>" not in answer.text
    if "JSON" in name:
        assert json.loads(answer.text) in ("yes", "no")


@pytest.mark.parametrize("name", CASES)
async def test_an_answer_has_its_form_and_a_budget_counts_on_after_a_move(
    name: str, sample: Sample
) -> None:
    spec, choice = await sample.spec(name)
    sample.compile(spec)
    tokens = sample.run(spec)
    check(name, *read(choice, tokens))

    if "thinking" in name:
        ids = [token.token_id for token in tokens]
        moved = replace(spec, request_id="moved", output=ids[: BUDGET // 2])
        assert [token.token_id for token in sample.run(moved)] == ids[BUDGET // 2 :]
