"""T6: the same tokens whatever path a request takes, over the real API; greedy ones equal
transformers' generate().
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from tests.system.client import Answer, body
from tests.system.cluster import Pair
from tests.system.prompts import Prompts
from tests.system.sampled import SAMPLED, SAMPLING
from tests.system.worker_process import WorkerProcess

# Around the edges of blocks (16), chunks (64) and the offload threshold (256), and some in between.
EDGES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 208, 256, 320)
LENGTHS = sorted(
    {
        1,
        2,
        3,
        7,
        9,
        24,
        40,
        72,
        100,
        150,
        200,
        300,
        *(edge + step for edge in EDGES for step in (-1, 0, 1)),
    }
)
MAX_TOKENS = 12

Ask = Callable[[list[int]], Answer]


def ask_twice(decode: WorkerProcess) -> Ask:
    """The second answer of two: its prompt is in the decode worker's prefix cache, so that at most
    one block is sent.
    """

    def ask(prompt: list[int]) -> Answer:
        decode.client.complete(prompt, "local", max_tokens=1)
        return decode.client.complete(prompt, "remote", max_tokens=MAX_TOKENS)

    return ask


@pytest.fixture(params=["mixed", "local", "remote", "prefix-hit"])
def ask(request: pytest.FixtureRequest, mixed: WorkerProcess, pair: Pair) -> Ask:
    if request.param == "mixed":
        return lambda prompt: mixed.client.complete(prompt, max_tokens=MAX_TOKENS)
    if request.param == "prefix-hit":
        return ask_twice(pair.decode)
    return lambda prompt: pair.decode.client.complete(prompt, request.param, max_tokens=MAX_TOKENS)


@pytest.mark.parametrize("concurrency", [1, 12], ids=["alone", "together"])
def test_greedy_tokens_equal_transformers(ask, concurrency, reference):
    # One set of prompts for all paths, so that transformers computes each once; a prompt of an
    # earlier path is another path's prefix
    # hit, which must not change a token either.
    prompts = Prompts("equality")
    cases = [prompts(length) for length in LENGTHS]
    assert len(cases) >= 50
    Random(concurrency).shuffle(cases)

    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(ask, cases))

    for prompt, answer in zip(cases, answers, strict=True):
        assert len(answer.tokens) == MAX_TOKENS
        reference.check(prompt, answer.tokens)


def test_seeded_sampling_is_the_same_on_every_path(pair, mixed, prompts, reference):
    for length in (5, 33, 64, 130):
        prompt = prompts(length)
        answers = [
            mixed.client.complete(prompt, **SAMPLED),
            pair.decode.client.complete(prompt, "remote", **SAMPLED),
            pair.decode.client.complete(prompt, "local", **SAMPLED),  # a prefix hit by now
            *_among_others(pair.decode, prompt, prompts),
        ]

        first = answers[0].choices[0]
        assert len(set(first.tokens)) > 1
        for answer in answers[1:]:
            reference.check_sampled(prompt, first.tokens, answer.tokens, SAMPLING)
            if answer.tokens == first.tokens:
                assert answer.choices[0].logprobs == pytest.approx(first.logprobs, abs=1e-4)


def test_unseeded_sampling_differs_between_requests(pair, prompts):
    prompt = prompts(20)

    answers = {
        tuple(pair.decode.client.complete(prompt, temperature=1.5, max_tokens=16).tokens)
        for _ in range(3)
    }

    assert len(answers) == 3


def test_greedy_logprobs_are_the_same_on_every_path(pair, mixed, prompts):
    prompt = prompts(65)

    answers = [
        mixed.client.complete(prompt, logprobs=1),
        *(pair.decode.client.complete(prompt, place, logprobs=1) for place in ("remote", "local")),
    ]

    assert all(answer.tokens == answers[0].tokens for answer in answers)
    assert all(
        answer.choices[0].logprobs == pytest.approx(answers[0].choices[0].logprobs, abs=1e-4)
        for answer in answers
    )


def _among_others(decode: WorkerProcess, prompt: list[int], prompts: Prompts) -> list[Answer]:
    """The prompt over both paths at once, between others."""
    others = [prompts(length) for length in (10, 40, 90, 150)]
    with ThreadPoolExecutor(6) as pool:
        noise = [
            pool.submit(decode.client.complete, other, place, max_tokens=30)
            for other, place in zip(others, ("remote", "local") * 2, strict=True)
        ]
        ours = [
            pool.submit(decode.client.complete, prompt, place, **SAMPLED)
            for place in ("remote", "local")
        ]
        answers = [future.result() for future in ours]
        for future in noise:
            future.result()
    return answers


def test_constrained_answers_are_the_same_on_every_path(pair, mixed, prompts):
    """Token n is the text "[n]" here; the prefill worker makes the first token under the constraint
    too.
    """
    prompt = prompts(65)
    for fields in ({}, {"temperature": 1.0, "seed": 7, "logprobs": 2}):
        requested = {
            "structured_outputs": {"regex": r"(\[1[0-9]{2}\]){9}"},
            "ignore_eos": False,
            "max_tokens": 30,
            **fields,
        }
        answers = [
            mixed.client.complete(prompt, **requested),
            *(
                pair.decode.client.complete(prompt, place, **requested)
                for place in ("remote", "local")
            ),
        ]

        assert [answer.prefill for answer in answers[1:]] == ["remote", "local"]
        assert all(answer.tokens == answers[0].tokens for answer in answers)
        assert [100 <= token <= 199 for token in answers[0].tokens[:9]] == 9 * [True]
        assert answers[0].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("place", ["remote", "local"])
def test_a_constraint_that_cannot_be_compiled_is_a_400_wherever_its_prompt_would_run(
    pair, prompts, place
):
    requested = body(prompts(20), place, guided_json={"properties": {"a": {"type": "strin"}}})
    reply = pair.decode.client.post(requested)

    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "guided_json"
    assert reply.json()["error"]["message"].startswith(
        "guided_json: #/properties/a/type: 'strin' is no type"
    )
