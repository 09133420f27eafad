"""Our requests as vLLM's token API takes them."""

import json
from typing import Any

import msgspec
import pytest

from pdcluster_worker.messages.requests import Constraint, RequestSpec, SamplingParams
from pdcluster_worker.stock_engine import generate_api
from pdcluster_worker.stock_engine.engine_api import VLLM_API


def params(spec: RequestSpec) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(generate_api.generate(spec, "m", attempt=1))
    sampling: dict[str, Any] = body["sampling_params"]
    return sampling


def test_a_rendered_form_goes_back_to_vllm_as_it_came() -> None:
    form = {
        "sampling_params": {"structured_outputs": {"regex": "a+"}, "thinking_token_budget": 5},
        "reasoning_ended": False,
        "reasoning_parser_kwargs": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    constraint = Constraint("rendered", json.dumps(form))
    spec = RequestSpec("r", [1], SamplingParams(max_tokens=5, seed=0, constraint=constraint))

    body = json.loads(generate_api.generate(spec, "m", attempt=1))

    assert form["sampling_params"].items() <= body["sampling_params"].items()
    assert (body["reasoning_ended"], body["reasoning_parser_kwargs"]) == (
        False,
        form["reasoning_parser_kwargs"],
    )


def test_our_own_form_holds_from_the_first_token() -> None:
    sampling = SamplingParams(max_tokens=5, seed=0, constraint=Constraint("regex", "a+"))

    body = json.loads(generate_api.generate(RequestSpec("r", [1], sampling), "m", attempt=1))

    assert body["reasoning_ended"] is True


def test_a_plain_request_leaves_nothing_to_the_servers_defaults() -> None:
    sampling = SamplingParams(max_tokens=5, seed=3, temperature=0.0, eos_token_ids=[2])
    body = json.loads(
        generate_api.generate(RequestSpec("r", [4, 5], sampling, priority=2), "m", attempt=1)
    )

    assert body == {
        "model": "m",
        "request_id": "r-1",
        "token_ids": [4, 5],
        "priority": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "sampling_params": {
            "max_tokens": 5,
            "temperature": 0.0,
            "stop_token_ids": [2],
            "ignore_eos": True,
            "detokenize": False,
        },
    }


def test_every_field_of_sampling_travels() -> None:
    """A field that is new in Sampling fails here until it has its place."""
    sampling = SamplingParams(
        max_tokens=9,
        seed=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias={5: -1.0},
        logprobs=2,
        prompt_logprobs=1,
        min_tokens=4,
        stop_token_ids=[8],
        eos_token_ids=[2],
        ignore_eos=True,
        constraint=Constraint("regex", "a+"),
    )
    default = SamplingParams(max_tokens=1, seed=0)
    assert all(
        getattr(sampling, field.name) != getattr(default, field.name)
        for field in msgspec.structs.fields(SamplingParams)
    )

    assert params(RequestSpec("r", [1], sampling)) == {
        "max_tokens": 9,
        "seed": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -1.0},
        "logprobs": 3,
        "min_tokens": 4,
        "stop_token_ids": [8],
        "ignore_eos": True,
        "structured_outputs": {"regex": "a+"},
        "detokenize": False,
    }


def test_a_request_that_moved_goes_on_after_its_tokens() -> None:
    spec = RequestSpec(
        "r", [1, 2], SamplingParams(max_tokens=9, seed=0, min_tokens=5), output=[3, 4]
    )
    body = json.loads(generate_api.generate(spec, "m", attempt=2))

    assert body["token_ids"] == [1, 2, 3, 4]
    assert body["sampling_params"]["max_tokens"] == 7
    assert body["sampling_params"]["min_tokens"] == 3


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint("json_schema", '{"type":"object"}'), {"json": '{"type":"object"}'}),
        (Constraint("json_object"), {"json_object": True}),
        (Constraint("choice", '["yes","no"]'), {"choice": ["yes", "no"]}),
        (Constraint("grammar", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (Constraint("structural_tag", "{}"), {"structural_tag": "{}"}),
    ],
)
def test_constraints_have_their_names_there(
    constraint: Constraint, expected: dict[str, Any]
) -> None:
    spec = RequestSpec("r", [1], SamplingParams(max_tokens=1, seed=0, constraint=constraint))

    assert VLLM_API.refusal(spec) is None
    assert params(spec)["structured_outputs"] == expected


def test_a_prefill_samples_nothing_of_the_request_and_keeps_its_kv() -> None:
    sampling = SamplingParams(
        max_tokens=9, seed=1, logprobs=3, prompt_logprobs=2, stop_token_ids=[5]
    )
    body = json.loads(
        generate_api.prefill(
            RequestSpec("r", [1], sampling, cache_salt=b"\xab" * 32), "m", attempt=1
        )
    )

    assert body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert body["cache_salt"] == "ab" * 32
    assert body["sampling_params"] == {
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
        "prompt_logprobs": 2,
    }
    assert "stream" not in body
