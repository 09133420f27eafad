"""Fields of a completion about its prompt and its tokens: echo, prompt_logprobs, ids."""

import pytest


async def test_echo_puts_the_prompt_before_the_text(rig, client):
    reply = await client.completions.create(
        model="tiny", prompt=["ab", "c"], max_tokens=2, echo=True, n=2
    )

    assert [choice.text for choice in reply.choices] == ["abHe", "abHe", "cHe", "cHe"]
    assert reply.choices[0].logprobs is None
    assert all(
        spec.sampling.prompt_logprobs is None for specs, _ in rig.backend.calls for spec in specs
    )


async def test_echo_with_logprobs_gives_those_of_the_prompt(rig, client):
    rig.say("xy")
    reply = await client.completions.create(
        model="tiny", prompt=["abé", "cd"], max_tokens=1, echo=True, logprobs=1, n=2
    )
    logprobs = reply.choices[1].logprobs

    assert logprobs.tokens == ["a", "b", "bytes:\\xc3", "bytes:\\xa9", "x"]
    assert logprobs.token_logprobs == [None, -1.0, -2.0, -3.0, -0.5]
    # of the one most likely and its own, which are one token here
    assert logprobs.top_logprobs[:2] == [None, {"b": -1.0}]
    assert logprobs.text_offset == [0, 1, 2, 2, 3]
    assert reply.choices[3].logprobs.token_logprobs == [None, -1.0, -0.5]
    assert reply.choices[3].text == "cdx"
    requested = [
        [spec.sampling.prompt_logprobs for spec in specs] for specs, _ in rig.backend.calls
    ]
    assert requested == [[1, None], [1, None]]


async def test_choices_of_a_streamed_echo_may_begin_in_any_order(rig, client, monkeypatch):
    generate = rig.backend.generate

    async def last_one_first(*arguments):
        for generated in sorted(
            [each async for each in generate(*arguments)], key=lambda each: -each.index
        ):
            yield generated

    monkeypatch.setattr(rig.backend, "generate", last_one_first)
    stream = await client.completions.create(
        model="tiny", prompt="abc", max_tokens=1, n=2, echo=True, logprobs=1, stream=True
    )
    chunks = [chunk.choices[0] async for chunk in stream]

    assert [(chunk.index, chunk.text) for chunk in chunks] == [(1, "abcH"), (0, "abcH")]
    assert [chunk.logprobs.token_logprobs for chunk in chunks] == [[None, -1.0, -2.0, -0.5]] * 2


async def test_20_log_probabilities_and_128_choices_are_served(rig, client):
    rig.say("x")
    reply = await client.completions.create(
        model="tiny", prompt="ab", logprobs=20, n=128, best_of=128
    )

    assert len(reply.choices) == 128
    assert len(rig.backend.calls[0][0]) == 128
    assert rig.backend.calls[0][0][0].sampling.logprobs == 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True, "logprobs": 20}, "logprobs"), ({"prompt_logprobs": 20}, "prompt_logprobs")],
)
async def test_more_figures_of_prompts_than_an_answer_holds_are_refused(rig, http, fields, param):
    rig.backend.max_model_len = 10_000
    reply = await http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": "a" * 2000, "n": 64, "max_tokens": 1, **fields},
    )

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert "ask for fewer" in reply.json()["error"]["message"]
    assert rig.backend.calls == []
