"""Every refusal: its status, OpenAI's error shape, and the field and limit in the message."""

import json

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import AdmissionSpec
from pdcluster_worker.errors import RequestError

HELLO = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class _Error(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    message: str
    type: str
    param: str | None
    code: str | None


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")
    error: _Error


def error_of(response) -> _Error:
    assert response.headers["x-request-id"]
    return _Body.model_validate_json(response.content).error


def rejections(rig) -> dict[str, float]:
    """Refused requests by reason, as counted."""
    samples = [
        sample for family in rig.metrics.request_rejected.collect() for sample in family.samples
    ]
    return {
        sample.labels["reason"]: sample.value
        for sample in samples
        if sample.name.endswith("_total") and sample.value
    }


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"messages": []}, "messages: at least 1 item"),
        ({"input_ids": [1, 2]}, "input_ids: token ids are the prompt of /v1/completions"),
        ({"messages": None}, "messages: valid list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is required"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            "messages[0].role: 'system', 'developer', 'user', 'assistant' or 'tool'",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: valid string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content: part 0 has type 'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content: part 0 must be",
        ),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content: part 0 must be"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content: surrogate"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]},
            "messages[0].tool_calls[0]: must be an object",
        ),
        ({"pdcluster": 3}, "pdcluster: must be an object"),
        ({"model": 3}, "model: valid string"),
        ({"max_tokens": -1}, "max_tokens: greater than or equal to 1"),
        ({"max_tokens": 0}, "max_tokens: greater than or equal to 1"),
        ({"max_tokens": "5"}, "max_tokens: valid integer"),
        ({"max_tokens": 1.5}, "max_tokens: valid integer"),
        ({"max_tokens": True}, "max_tokens: valid integer"),
        (
            {"max_tokens": 500},
            "max_tokens: maximum context length is 200 tokens. However, you requested",
        ),
        (
            {"max_completion_tokens": 500},
            "max_completion_tokens: max_completion_tokens can be at most",
        ),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens: more than the 3 tokens"),
        ({"temperature": 2.1}, "temperature: less than or equal to 2"),
        ({"temperature": float("nan")}, "temperature: finite"),
        ({"temperature": float("inf")}, "temperature: finite"),
        ({"top_p": 1.1}, "top_p: less than or equal to 1"),
        ({"n": 129}, "n: less than or equal to 128"),
        ({"n": 0}, "n: greater than or equal to 1"),
        ({"stop": ["a"] * 17}, "stop: at most 16"),
        ({"stop": [""]}, "stop[0]: at least 1 character"),
        ({"stop": "x" * 1025}, "stop[0]: at most 1024"),
        ({"seed": 2**63}, "seed: less than or equal to"),
        ({"presence_penalty": 3}, "presence_penalty: less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty: greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty: greater than or equal to 0.01"),
        ({"logit_bias": {"259": 1}}, "logit_bias: from 0 to 258"),
        ({"logit_bias": {"-1": 1}}, "logit_bias: from 0 to 258"),
        ({"logit_bias": {"\u00b2": 1}}, "logit_bias: from 0 to 258"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias: at most 1024"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1: less than or equal to 100"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs: logprobs=true"),
        ({"stop_token_ids": [259]}, "stop_token_ids: from 0 to 258, not 259"),
        ({"stop_token_ids": [0] * 65}, "stop_token_ids: at most 64"),
        ({"stream_options": {"include_usage": True}}, "stream_options: only with stream=true"),
        ({"priority": -1}, "priority: leave it out, or set qos.allowClientPriority"),
        ({"priority": 1001}, "priority: from -1000 to 1000"),
        ({"priority": -1001}, "priority: from -1000 to 1000"),
        ({"pdcluster": {"prefill": "there"}}, "pdcluster.prefill: 'auto', 'local' or 'remote'"),
        ({"guided_json": 3}, "guided_json: must be an object or a valid boolean or a valid string"),
        ({"structured_outputs": {"json": []}}, "structured_outputs.json: must be an object or"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema: must be an object or a valid boolean",
        ),
    ],
)
async def test_chat_refuses_with_the_field_and_the_limit(rig, http, fields, fault):
    param, words = fault.split(": ", 1)
    body = {"model": "tiny", "messages": HELLO} | fields
    response = await http.post(
        CHAT, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = error_of(response)

    assert (response.status_code, error.type, error.param) == (400, "invalid_request_error", param)
    assert words in error.message
    assert rig.backend.calls == []


@pytest.mark.parametrize(
    "fields",
    [
        {
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "store": False,
            "parallel_tool_calls": True,
        },
        {
            "temperature": None,
            "stop": None,
            "n": None,
            "logit_bias": None,
            "seed": None,
            "stream": None,
            "tools": None,
        },
        {"nobody_defined_this": {"a": [1]}, "metadata": {"a": "b"}},
    ],
)
async def test_chat_accepts_defaults_nulls_and_unknown_fields(http, fields):
    response = await http.post(CHAT, json={"model": "tiny", "messages": HELLO, **fields})

    assert response.status_code == 200


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"prompt": ""}, "prompt: not empty"),
        ({"prompt": []}, "prompt: not empty"),
        ({"prompt": ["a", ""]}, "prompt: item 1 must be a string that is not empty"),
        ({"prompt": [[1], []]}, "prompt: item 1"),
        ({"prompt": [1, "a"]}, "prompt: item 0"),
        ({"prompt": {"a": 1}}, "prompt: must be a string"),
        ({"prompt": "\udfff"}, "prompt: surrogate"),
        ({"prompt": ["\udfff"]}, "prompt: item 0 character 0"),
        ({"prompt": ["a"] * 257}, "prompt: at most 256"),
        (
            {"prompt": ["a"] * 65, "n": 16},
            "prompt: 65 prompts with n=16 are 1040 generations, more than the 1024",
        ),
        ({"prompt": [259]}, "prompt: from 0 to 258, not 259"),
        ({"prompt": [-1]}, "prompt: from 0 to 258, not -1"),
        ({"prompt": [True, False]}, "prompt: item 0"),
        ({"logprobs": 21}, "logprobs: less than or equal to 20"),
        ({"logprobs": True}, "logprobs: valid integer"),
        ({"best_of": 3, "n": 2}, "best_of: not supported"),
        ({"echo": 1}, "echo: valid boolean"),
        ({"max_tokens": 0}, "max_tokens: or 0 together with echo=true"),
        ({"max_tokens": -1, "echo": True}, "max_tokens: greater than or equal to 0"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: less than or equal to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: greater than or equal to 0"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: stream=true"),
        ({"best_of": 3, "n": 2}, "best_of: value of n"),
        ({"suffix": "x"}, "suffix: not supported"),
    ],
)
async def test_completions_refuse_with_the_field_and_the_limit(http, fields, fault):
    param, words = fault.split(": ", 1)
    body = {"model": "tiny", "prompt": "a"} | fields
    response = await http.post(
        COMPLETIONS, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    error = error_of(response)

    assert (response.status_code, error.param) == (400, param)
    assert words in error.message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"a"', "must be a JSON object"),
        (b"\xff\xfe\xff", "JSON"),
        (b"[" * 9000, "nested too deeply"),
        (b'{"model": "tiny", "seed": ' + b"9" * 5000 + b"}", "overlong number"),
    ],
)
async def test_a_body_that_is_not_a_json_object_is_refused(http, body, words):
    response = await http.post(CHAT, content=body, headers={"content-type": "application/json"})

    assert response.status_code == 400
    assert words in error_of(response).message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("messages", [0], "messages[0]: must be an object"),
        ("stop", [0], "stop[0]: must be a valid string"),
        ("stop_token_ids", ["x"], "stop_token_ids[0]: must be a valid integer"),
    ],
)
async def test_a_long_list_of_wrong_items_makes_one_error(http, field, value, message):
    response = await http.post(CHAT, json={"model": "tiny", "messages": HELLO, field: value * 2000})

    assert error_of(response).message.startswith(message)
    assert "more" not in error_of(response).message


async def test_a_request_has_at_most_as_many_generations_as_may_wait(rig, http):
    rig.policy = PolicyConfig(admission=AdmissionSpec(max_queued_requests=4))
    requested = [{"prompt": ["a"] * 2, "n": 2}, {"prompt": ["a"] * 5}, {"prompt": "a", "n": 5}]
    replies = [
        await http.post(COMPLETIONS, json={"model": "tiny", **fields}) for fields in requested
    ]

    assert [reply.status_code for reply in replies] == [200, 400, 400]
    assert [error_of(reply).param for reply in replies[1:]] == ["prompt", "n"]
    assert "qos.admission.maxQueuedRequests" in error_of(replies[2]).message
    assert sum(len(specs) for specs, _ in rig.backend.calls) == 4


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_priority_counts_where_the_policy_allows_it_now(rig, http, path):
    async def status_of(priority: int | None) -> int:
        body = {"model": "tiny", "messages": HELLO, "prompt": "a", "priority": priority}
        return (await http.post(path, json=body)).status_code

    assert [await status_of(priority) for priority in (None, 0, -1000)] == [200, 200, 400]
    rig.policy = PolicyConfig(allow_client_priority=True)
    assert [await status_of(priority) for priority in (-1000, 1000)] == [200, 200]
    rig.policy = PolicyConfig()
    assert await status_of(1) == 400

    assert [specs[0].priority for specs, _ in rig.backend.calls] == [0, 0, -1000, 1000]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_unknown_model_is_404(rig, http, path):
    response = await http.post(path, json={"model": "other", "messages": HELLO, "prompt": "a"})
    error = error_of(response)

    assert (response.status_code, error.code, error.param) == (404, "model_not_found", "model")
    assert "use 'tiny'" in error.message
    assert rig.value("pdcluster_request_rejected_total", reason="model_not_found") == 1


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(rig, http):
    response = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": [1] * 200})
    error = error_of(response)

    assert response.status_code == 400
    assert error.code == "context_length_exceeded"
    assert error.param == "prompt"
    assert error.message == (
        "This model's maximum context length is 200 tokens. However, your prompt resulted in 200 "
        "tokens: shorten prompt to at most 199."
    )
    assert rig.value("pdcluster_request_rejected_total", reason="context_length_exceeded") == 1


async def test_a_prompt_larger_than_the_kv_cache_is_refused_with_its_size(rig, http):
    rig.backend.length_note = "its KV cache of 13 blocks of 16 tokens holds no more"
    response = await http.post(
        COMPLETIONS, json={"model": "tiny", "prompt": [1] * 180, "max_tokens": 30}
    )

    assert response.status_code == 400
    assert error_of(response).message == (
        "This model's maximum context length is 200 tokens. However, you requested 210 tokens (180 "
        "in the prompt, 30 in the completion): "
        "max_tokens can be at most 20 (its KV cache of 13 blocks of 16 tokens holds no more)."
    )


async def test_a_prompt_that_leaves_one_token_is_served(rig, http):
    response = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": [1] * 199})

    assert response.json()["usage"]["completion_tokens"] == 1


async def test_a_body_over_the_limit_is_413_with_and_without_its_length(rig, wire):
    async def chunks():
        for _ in range(30):
            yield b" " * 1000

    announced = await wire.post(CHAT, content=b" " * 20_001)
    chunked = await wire.post(CHAT, content=chunks())
    exact = await wire.post(
        CHAT,
        content=json.dumps({"model": "tiny", "messages": HELLO}).encode().ljust(20_000),
        headers={"content-type": "application/json"},
    )

    assert [announced.status_code, chunked.status_code, exact.status_code] == [413, 413, 200]
    assert "20000 bytes" in error_of(chunked).message
    assert rig.value("pdcluster_request_rejected_total", reason="body_too_large") == 2


async def test_an_error_before_the_first_token_has_its_own_status(rig, http, client):
    rig.backend.error = RequestError(
        "no prefill worker", status=503, code="no_prefill_worker", retry_after_seconds=3
    )
    for stream in (False, True):
        response = await http.post(
            CHAT, json={"model": "tiny", "messages": HELLO, "stream": stream}
        )
        assert (response.status_code, response.headers["retry-after"]) == (503, "3")
        assert error_of(response).type == "server_error"
        assert error_of(response).code == "no_prefill_worker"
    with pytest.raises(openai.InternalServerError, match="no prefill worker"):
        await client.chat.completions.create(model="tiny", messages=HELLO)

    assert rig.value("pdcluster_request_rejected_total", reason="no_prefill_worker") == 3


@pytest.mark.parametrize("code", ["queue_full", "draining", "not_ready", "no_prefill_worker"])
async def test_a_refusal_before_any_work_is_a_rejection(rig, http, code):
    rig.backend.error = RequestError("not now", status=503, code=code)
    await http.post(CHAT, json={"model": "tiny", "messages": HELLO})

    assert rejections(rig) == {code: 1}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("prefill_failed", 503),
        ("engine_dead", 503),
        ("decode_worker_lost", 503),
        ("transfer_failed", 503),
        ("engine_error", 500),
        (None, 500),
    ],
)
async def test_a_failure_of_work_is_no_rejection(rig, http, code, status):
    rig.backend.error = RequestError("it broke", status=status, code=code)
    response = await http.post(CHAT, json={"model": "tiny", "messages": HELLO})

    assert (response.status_code, error_of(response).code) == (status, code)
    assert rejections(rig) == {}


async def test_an_error_after_the_first_token_ends_a_stream_without_done(rig, http, client):
    rig.backend.error, rig.backend.error_after = RequestError("peer lost", status=503), 2
    response = await http.post(CHAT, json={"model": "tiny", "messages": HELLO, "stream": True})
    events = response.text.removesuffix("\n\n").split("\n\n")

    assert response.status_code == 200
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "peer lost"
    assert len(events) == 3
    with pytest.raises(openai.APIError, match="peer lost"):
        [
            chunk
            async for chunk in await client.chat.completions.create(
                model="tiny", messages=HELLO, stream=True
            )
        ]


async def test_an_error_after_the_first_token_of_a_whole_answer_has_its_status(rig, http):
    rig.backend.error, rig.backend.error_after = RequestError("peer lost", status=503), 2
    response = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": "a"})

    assert (response.status_code, error_of(response).message) == (503, "peer lost")
    assert rejections(rig) == {}


@pytest.mark.parametrize("after", [0, 2])
async def test_a_bug_is_a_logged_500(rig, http, caplog, after):
    rig.backend.error, rig.backend.error_after = ZeroDivisionError("secret detail"), after
    response = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": "a"})
    error = error_of(response)

    assert (response.status_code, error.type, error.code) == (500, "server_error", "internal_error")
    assert response.headers["x-request-id"] in error.message
    assert "secret" not in error.message
    assert any(response.headers["x-request-id"] in record.getMessage() for record in caplog.records)


async def test_a_bug_in_a_stream_is_an_error_event(rig, http, caplog):
    rig.backend.error, rig.backend.error_after = ZeroDivisionError("secret detail"), 2
    response = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": "a", "stream": True})

    assert '"code":"internal_error"' in response.text
    assert "secret" not in response.text
    assert "[DONE]" not in response.text
    assert "unhandled error" in caplog.text


async def test_a_backend_that_ends_too_early_is_a_500(rig, http, caplog):
    async def nothing(specs, prefill, hints, reader):
        for generated in ():
            yield generated

    rig.backend.generate = nothing
    response = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": "a"})

    assert response.status_code == 500
    assert "the backend ended with 1 choices unfinished" in caplog.text


async def test_one_failing_prompt_ends_the_whole_list(rig, http):
    rig.backend.error, rig.backend.error_after = RequestError("no room", status=503), 5
    response = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": ["a", "b", "c"]})

    assert response.status_code == 503
    assert rig.backend.cancelled.is_set()
