"""Our requests as SGLang takes them, and its answers and numbers as ours."""

import json
from typing import Any

import pytest

from pdcluster_worker.messages.requests import Constraint, PromptLogprob, RequestSpec
from pdcluster_worker.messages.requests import SamplingParams as Sampling
from pdcluster_worker.stock_engine.metrics_page import Scrape
from pdcluster_worker.stock_engine.responses import (
    StockEngineError,
    TokenStream,
    read_prompt_logprobs,
)
from pdcluster_worker.stock_engine.sglang_api import decode_chunk, decode_whole, sglang_api

API = sglang_api(block_size=16, prefix_caching=True)
SALT = b"\xab" * 32


def spec(output: tuple[int, ...] = (), **sampling: Any) -> RequestSpec:
    given = Sampling(**{"max_tokens": 6, "seed": 7, **sampling})
    return RequestSpec("r", [1, 2], given, output=list(output))


def sent(of: RequestSpec) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(API.generate(of, "m", attempt=2))
    return body


def event(ids: list[int], reason: dict[str, Any] | None = None, **meta: Any) -> bytes:
    info = {"id": "r-1", "finish_reason": reason, "prompt_tokens": 2, "cached_tokens": 16, **meta}
    return b"data: " + json.dumps({"text": "", "output_ids": ids, "meta_info": info}).encode()


def fed(of: RequestSpec, *events: bytes) -> list[Any]:
    stream = TokenStream(of, decode=decode_chunk)
    return stream.feed(b"".join(each + b"\n\n" for each in (*events, b"data: [DONE]")))


def test_a_request_has_all_sampling_and_goes_on_after_what_was_made() -> None:
    body = sent(spec((3,), temperature=0.5, top_k=4, min_tokens=3, logprobs=2))

    assert body == {
        "rid": "r-2",
        "input_ids": [1, 2, 3],
        "priority": 0,
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "sampling_params": {
            "temperature": 0.5,
            "top_k": 4,
            "max_new_tokens": 5,
            "min_new_tokens": 2,
            "ignore_eos": False,
            "stop_token_ids": [],
            "sampling_seed": 7,
        },
    }


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint("json_schema", "{}"), {"json_schema": "{}"}),
        (Constraint("json_object"), {"json_schema": '{"type":"object"}'}),
        (Constraint("choice", '["a.","b"]'), {"regex": "(a\\.|b)"}),
        (Constraint("grammar", 'root ::= "a"'), {"ebnf": 'root ::= "a"'}),
    ],
)
def test_a_constraint_is_a_parameter_of_sglang(constraint, expected) -> None:
    assert sent(spec(constraint=constraint))["sampling_params"].items() >= expected.items()


@pytest.mark.parametrize(
    ("refused", "param"),
    [
        (spec(ignore_eos=True, stop_token_ids=[5]), "stop_token_ids"),
        (spec((3,), constraint=Constraint("regex", "a")), "constraint"),
    ],
)
def test_what_it_would_run_wrongly_is_refused_by_name(refused, param) -> None:
    found = API.refusal(refused)

    assert found is not None
    assert found[1] == param
    assert "with engine type sglang" in found[0]


def test_tokens_their_scores_and_their_end() -> None:
    made = fed(
        spec(logprobs=1, stop_token_ids=[9]),
        event(
            [8], output_token_logprobs=[[-0.5, 8, None]], output_top_logprobs=[[[-0.5, 8, None]]]
        ),
        event(
            [9],
            {"type": "stop", "matched": 9},
            output_token_logprobs=[[-1.5, 9, None]],
            output_top_logprobs=[[[-0.25, 4, None]]],
        ),
    )

    assert [(each.token_id, each.logprob, each.top_logprobs) for each in made] == [
        (8, -0.5, [(8, -0.5)]),
        (9, -1.5, [(4, -0.25)]),
    ]
    assert (made[-1].finish_reason, made[-1].stop_reason) == ("stop", 9)
    assert made[-1].cached_tokens == 16


@pytest.mark.parametrize(
    ("answer", "is_refusal"),
    [
        (event([], {"type": "abort", "message": "bad grammar", "status_code": 400}), True),
        (event([], {"type": "abort", "message": "bad grammar", "status_code": 503}), False),
        (b'data: {"error":{"message":"bad grammar","type":"x","code":400}}', True),
        (b'data: {"output_ids":"bad grammar"}', False),
        (event([8], {"type": "stop", "matched": "bad grammar"}), False),
    ],
)
def test_an_aborted_request_fails_with_its_reason(answer: bytes, is_refusal: bool) -> None:
    with pytest.raises(StockEngineError, match=r"bad grammar|cannot be read") as failed:
        fed(spec(), answer)

    assert failed.value.is_refusal == is_refusal


def test_scores_of_a_prompt_begin_at_its_second_token() -> None:
    meta = {
        "input_token_logprobs": [[None, 1, None], [-3.0, 2, None], [-0.5, 4, None]],
        "input_top_logprobs": [
            None,
            [[-0.1, 7, None], [-3.0, 2, None]],
            [[-0.2, 9, None], [-0.4, 3, None]],
        ],
    }
    answer = json.dumps({"output_ids": [5], "meta_info": meta}).encode()

    scores = read_prompt_logprobs(answer, spec(prompt_logprobs=2), decode_whole)

    assert scores == [
        PromptLogprob(-3.0, 2, [(7, -0.1), (2, -3.0)]),
        PromptLogprob(-0.5, 0, [(9, -0.2), (3, -0.4)]),
    ]


def test_its_loads_are_numbers_of_the_engine() -> None:
    load = {
        "dp_rank": 0,
        "num_running_reqs": 2,
        "num_waiting_reqs": 3,
        "num_used_tokens": 64,
        "max_total_num_tokens": 256,
        "token_usage": 0.25,
    }
    (scrape,) = API.read_numbers(json.dumps({"loads": [load]}).encode(), 1)

    assert scrape == Scrape(16, 16, True, 0.25, num_running=2, num_waiting=3, num_queued=3)
    assert scrape.used_blocks == 4


@pytest.mark.parametrize(("length", "longest"), [(100, 94), (4096, 250), (4, 1)])
def test_requests_that_it_would_cut_short_are_too_long(length: int, longest: int) -> None:
    assert API.longest(length, Scrape(16, 16)) == longest


def test_versions_are_known_to_the_last_digit() -> None:
    assert API.unknown_version("0.5.23") == ""
    assert API.unknown_version("0.5.24") == "SGLang 0.5.24 is not known here: use 0.5.23"
