"""Fields of a completion about its prompt and its tokens: echo, prompt_logprobs, ids."""

import pytest

HELLO = [{"role": "user", "content": "Hi"}]


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


async def test_the_usage_of_chunks_counts_no_token_that_is_not_shown(client):
    stream = await client.completions.create(
        model="tiny",
        prompt=[0, 1],
        max_tokens=0,
        echo=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )

    assert [chunk.usage.total_tokens async for chunk in stream] == [2, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_says_what_there_is_of_the_prompt(rig, client, stream):
    options = {"include_usage": True} if stream else None
    reply = await client.completions.create(
        model="tiny",
        prompt=[0, 258, 1],
        max_tokens=0,
        echo=True,
        logprobs=0,
        stream=stream,
        stream_options=options,
    )
    if stream:
        chunks = [chunk async for chunk in reply]
        reply, usage = chunks[0], chunks[-1].usage
        assert len(chunks) == 2
    else:
        usage = reply.usage
    (choice,) = reply.choices

    assert (choice.text, choice.finish_reason) == ('!<|im_end|>"', "length")
    assert choice.logprobs.tokens == ["!", "<|im_end|>", '"']
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0]
    assert choice.logprobs.text_offset == [0, 1, 11]
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 0, 3)


async def test_a_streamed_echo_comes_with_the_first_token(rig, client):
    stream = await client.completions.create(
        model="tiny", prompt="ab", max_tokens=3, echo=True, logprobs=1, stream=True
    )
    chunks = [chunk.choices[0] async for chunk in stream]

    assert [chunk.text for chunk in chunks] == ["abH", "e", "l"]
    assert chunks[0].logprobs.token_logprobs == [None, -1.0, -0.5]
    assert [offset for chunk in chunks for offset in chunk.logprobs.text_offset] == [0, 1, 2, 3, 4]


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


async def test_prompt_logprobs_have_vllms_shape(rig, http):
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 0, "prompt_logprobs": 2}
    reply = (await http.post("/v1/completions", json=body)).json()

    assert reply["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "65": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
            "66": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
        },
    ]
    assert reply["choices"][0]["text"] == ""
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 1, "prompt_logprobs": 0}
    reply = (await http.post("/v1/chat/completions", json=body)).json()
    num_prompt = reply["usage"]["prompt_tokens"]
    assert [list(entry) for entry in reply["prompt_logprobs"][1:]] == [
        [str(token_id)] for token_id in rig.spec.prompt[1:]
    ]
    assert len(reply["prompt_logprobs"]) == num_prompt
    assert (
        "prompt_logprobs"
        not in (
            await http.post("/v1/chat/completions", json=body | {"prompt_logprobs": None})
        ).json()
    )


async def test_token_ids_are_returned_on_request(rig, http):
    rig.say("xy")
    ids = [rig.tokenizer._tokenizer.token_to_id(name) for name in ("x", "y", "<|im_end|>")]
    body = {"model": "tiny", "prompt": ["ab", "c"], "return_token_ids": True}
    choices = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert [(choice["prompt_token_ids"], choice["token_ids"]) for choice in choices] == [
        ([64, 65], ids),
        ([66], ids),
    ]

    chat = {"model": "tiny", "messages": HELLO, "return_token_ids": True}
    reply = (await http.post("/v1/chat/completions", json=chat)).json()
    assert reply["choices"][0]["token_ids"] == ids
    assert reply["prompt_token_ids"] == rig.spec.prompt


@pytest.mark.parametrize(
    ("path", "requested"),
    [("/v1/completions", {"prompt": "ab"}), ("/v1/chat/completions", {"messages": HELLO})],
)
async def test_token_ids_are_streamed_with_their_tokens(rig, client, path, requested):
    create = client.completions.create if "prompt" in requested else client.chat.completions.create
    chunks = [
        chunk
        async for chunk in await create(
            model="tiny", stream=True, extra_body={"return_token_ids": True}, **requested
        )
    ]

    prompts = [
        getattr(chunk.choices[0], "prompt_token_ids", None)
        or getattr(chunk, "prompt_token_ids", None)
        for chunk in chunks
    ]
    assert [prompt for prompt in prompts if prompt] == [rig.backend.calls[0][0][0].prompt]
    assert [
        token_id for chunk in chunks for token_id in chunk.choices[0].token_ids
    ] == rig.backend.script(None)


async def test_tokens_are_named_by_their_ids_on_request(rig, client):
    rig.say("x")
    reply = await client.completions.create(
        model="tiny",
        prompt="ab",
        max_tokens=1,
        echo=True,
        logprobs=1,
        extra_body={"return_tokens_as_token_ids": True},
    )
    assert reply.choices[0].logprobs.tokens == ["token_id:64", "token_id:65", "token_id:87"]
    chat = await client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        logprobs=True,
        top_logprobs=1,
        extra_body={"return_tokens_as_token_ids": True},
    )
    assert chat.choices[0].logprobs.content[0].token == "token_id:87"
    assert chat.choices[0].logprobs.content[0].bytes == [ord("x")]


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
