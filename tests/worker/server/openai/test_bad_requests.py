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


async def test_without_a_known_vocabulary_ids_are_the_engine_s_to_refuse(rig, http):
    rig.backend.vocab_size = 0
    fields = {"top_k": 1, "stop_token_ids": [300], "logit_bias": {"300": 1}}
    response = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": [999], **fields})
    spec = rig.backend.calls[0][0][0]

    assert (response.status_code, spec.prompt, spec.sampling.top_k) == (200, [999], 1)
    assert (spec.sampling.stop_token_ids, spec.sampling.logit_bias) == ([300], {300: 1})
    beyond = await http.post(COMPLETIONS, json={"model": "tiny", "prompt": [2**31]})
    assert error_of(beyond).message.endswith(f"from 0 to {2**31 - 2}, not {2**31}")


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
