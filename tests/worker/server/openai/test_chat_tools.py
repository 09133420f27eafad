"""Tools and reasoning over /v1/chat/completions, with the official client and scripted models."""

import json
from collections.abc import AsyncIterator

import openai
import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.requests import CONSTRAINT_PARAM
from pdcluster_worker.server.generation.chat_answer import ParserNames
from pdcluster_worker.server.text.chat_template import ChatTemplate
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.worker.server.conftest import Rig
from tests.worker.server.recorded_calls import HERMES_NOW, HERMES_PARIS

ASK = [{"role": "user", "content": "Weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]


def ask(client: openai.AsyncOpenAI, **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": ASK, **fields})


def client_of(rig: Rig, template: str, **names: str) -> openai.AsyncOpenAI:
    rig.tokenizer.chat_template = ChatTemplate(template, {})
    return rig.openai(parsers=ParserNames(**names))


@pytest.fixture
async def client(rig: Rig, model_folder) -> AsyncIterator[openai.AsyncOpenAI]:
    rig.tokenizer = Tokenizer.load(model_folder, "chatml-tools")
    rig.backend.max_model_len = 4000
    rig.policy = PolicyConfig()
    async with client_of(rig, rig.tokenizer.chat_template.tool_source) as client:
        yield client


THINKING = (
    "{% for m in messages %}{{ m.content }}{{ '<think>' + m.reasoning_content + '</think>' if "
    "m.reasoning_content }}\n{% endfor %}"
)
THINKING += "{% if add_generation_prompt %}assistant"
THINKING += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
THINKING += "{{ reasoning_effort }}{% endif %}"


@pytest.fixture
async def thinker(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(rig, THINKING) as client:
        yield client


def constraint(rig: Rig):
    return rig.spec.sampling.constraint


@pytest.mark.parametrize(("stop", "num_pieces"), [(None, 5), ("never", 1)])
async def test_arguments_of_a_call_that_is_held_to_its_form_come_in_pieces(
    rig, client, stop, num_pieces
):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    rig.say(f"So.\n{HERMES_PARIS}\n{HERMES_NOW}")
    fields = {"model": "tiny", "messages": ASK, "tools": [strict, NOW], "stop": stop}
    whole = await client.chat.completions.create(**fields)
    deltas = [
        call
        async for chunk in await client.chat.completions.create(**fields, stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    pieces = [call.function.arguments for call in deltas if call.index == 0]

    assert len([piece for piece in pieces if piece]) >= num_pieces
    assert [call.function.name for call in deltas if call.id] == ["get_weather", "now"]
    assert [call.function.arguments for call in whole.choices[0].message.tool_calls] == [
        "".join(pieces),
        "{}",
    ]
    assert json.loads("".join(pieces)) == {"city": "Paris"}
    assert whole.choices[0].finish_reason == "tool_calls"


async def test_choices_have_calls_of_their_own_with_logprobs_and_usage(rig, client):
    rig.say(HERMES_NOW)
    fields = {"tools": TOOLS, "n": 2, "logprobs": True, "top_logprobs": 1}
    reply = await ask(client, **fields)
    chunks = [
        chunk
        async for chunk in await ask(
            client, stream=True, stream_options={"include_usage": True}, **fields
        )
    ]
    num_tokens = len(rig.backend.script(rig.backend.calls[0][0][0]))

    assert len({choice.message.tool_calls[0].id for choice in reply.choices}) == 2
    assert [len(choice.logprobs.content) for choice in reply.choices] == [num_tokens] * 2
    assert (
        sum(len(choice.logprobs.content) for chunk in chunks for choice in chunk.choices)
        == 2 * num_tokens
    )
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens == 2 * num_tokens
    assert [
        choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason
    ] == ["tool_calls"] * 2


async def test_an_engines_error_of_a_format_with_tools_names_the_format(rig, client):
    rig.backend.error = RequestError(
        "#/properties/x: no text at all fits it", param=CONSTRAINT_PARAM
    )
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, tools=TOOLS, response_format=schema)

    assert caught.value.body["param"] == "response_format.json_schema.schema"


CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


def with_call(**function) -> list[dict]:
    call = {**CALLED["tool_calls"][0], "function": {"name": "f", "arguments": "{}", **function}}
    return [*ASK, {**CALLED, "tool_calls": [call]}]


UNKNOWN = "{{ tools }}{{ messages[0].content }}"


async def test_a_template_that_shows_no_form_of_calls_needs_a_parser(rig):
    rig.backend.max_model_len = 4000
    async with client_of(rig, UNKNOWN) as client:
        with pytest.raises(openai.BadRequestError, match=r"set model\.toolParser"):
            await ask(client, tools=TOOLS)
        rig.say('[{"name": "now", "parameters": {}}]')
        reply = await ask(client, tools=TOOLS, tool_choice="required")
        assert reply.choices[0].message.tool_calls[0].function.name == "now"


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("pythonic", "[now()]", ["now"]),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}", ["now"]),
        ("none", "[now()]", []),
    ],
)
async def test_a_parser_that_is_configured_is_used(rig, parser, text, calls):
    rig.backend.max_model_len = 4000
    async with client_of(rig, UNKNOWN, tools=parser) as client:
        rig.say(text)
        reply = await ask(client, tools=TOOLS)
    made = reply.choices[0].message.tool_calls or []

    assert [call.function.name for call in made] == calls
    assert all(len(call.id) == 9 for call in made if parser == "mistral")


@pytest.mark.parametrize("parser", ["pythonic", "mistral"])
async def test_a_format_with_calls_that_are_no_text_is_refused(rig, parser):
    rig.backend.max_model_len = 4000
    async with client_of(rig, UNKNOWN, tools=parser) as client:
        with pytest.raises(openai.BadRequestError, match="tool_choice to none or required"):
            await ask(client, tools=TOOLS, response_format={"type": "json_object"})


async def test_a_structural_tag_that_is_none_is_refused_where_it_has_to_be_joined(rig, thinker):
    with pytest.raises(openai.BadRequestError, match="with a format"):
        await ask(
            thinker, extra_body={"structured_outputs": {"structural_tag": '{"structures": []}'}}
        )


async def test_an_answer_goes_on_within_its_reasoning(rig, thinker):
    rig.say(" on.</think>Yes.")
    messages = [*ASK, {"role": "assistant", "content": "<think>Thinking"}]
    reply = await ask(thinker, messages=messages, extra_body={"continue_final_message": True})

    assert rig.prompt().endswith("<think>Thinking")
    assert (reply.choices[0].message.reasoning, reply.choices[0].message.content) == ("on.", "Yes.")


async def test_a_template_that_changes_the_last_message_cannot_be_continued(rig):
    async with client_of(rig, "{{ messages[0].content }}") as client:
        with pytest.raises(openai.BadRequestError, match="changes the last message"):
            await ask(
                client,
                messages=[*ASK, {"role": "assistant", "content": "x y z"}],
                extra_body={"continue_final_message": True},
            )


@pytest.mark.parametrize("arguments", ['{"name": "', "{x}", '{"x": "\\ud800"}', "[1]", '"a"'])
async def test_a_conversation_goes_on_after_a_call_that_was_cut_off(rig, client, arguments):
    messages = [
        *with_call(arguments=arguments),
        {"role": "tool", "tool_call_id": "a", "content": "no such call"},
    ]
    await ask(client, messages=messages, tools=TOOLS)

    assert f'"arguments": {json.dumps(arguments)}' in rig.prompt()


ITEMS_ALONE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for key, value in c.function.arguments|items %}<{{ key }}>{{ value }}{% endfor %}"
    "{% endfor %}{% endfor %}{{ tools }}"
)


async def test_a_template_that_takes_objects_alone_is_given_one_for_a_call_that_was_cut_off(rig):
    rig.backend.max_model_len = 4000
    (called,) = with_call(arguments='{"name": "')[1:]
    whole = {**called["tool_calls"][0], "id": "b"}
    whole["function"] = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    messages = [*ASK, {**called, "tool_calls": [*called["tool_calls"], whole]}]
    async with client_of(rig, ITEMS_ALONE) as client:
        await ask(client, messages=messages)
        assert rig.prompt().count("<city>Rome") == 1
        rig.tokenizer.chat_template = ChatTemplate("{{ raise_exception('no') }}", {})
        with pytest.raises(openai.BadRequestError, match="template refuses these messages"):
            await ask(client, messages=messages)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("required", '[{"name": "now", "parameters": {}}]'),
        ({"type": "function", "function": {"name": "now"}}, "{}"),
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"required": ["b"]}}},
    ],
)
async def test_a_format_of_the_text_changes_nothing_in_calls_that_are_forced(
    rig, client, choice, message, form
):
    rig.say(message)
    fields = {"tools": TOOLS, "tool_choice": choice}
    await ask(client, **fields)
    alone = constraint(rig)
    reply = await ask(client, response_format=form, **fields)

    assert constraint(rig) == alone
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["now"]
    rig.backend.error = RequestError("cannot be compiled", param=CONSTRAINT_PARAM)
    with pytest.raises(openai.BadRequestError, match="tools: cannot be compiled"):
        await ask(client, response_format=form, **fields)


async def test_a_call_in_reasoning_that_is_never_closed_is_answered(rig, client):
    source = rig.tokenizer.chat_template.tool_source
    rig.say(f"<think>They want the time.\n{HERMES_NOW}")
    async with client_of(rig, source, reasoning="qwen3") as thinker:
        reply = await ask(thinker, tools=TOOLS)
    message = reply.choices[0].message

    assert [call.function.name for call in message.tool_calls] == ["now"]
    assert (message.content, message.reasoning) == (None, "They want the time.")
