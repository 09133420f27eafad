"""The official client, unchanged, against a real socket."""

import asyncio

import httpx
import openai
import pytest

from pdcluster_schema.policy import PolicyConfig

HELLO = [{"role": "user", "content": "Hi"}]


def ask(client: openai.AsyncOpenAI, **fields):
    return client.chat.completions.create(model="tiny", messages=HELLO, **fields)


async def test_sync_client_works(url):
    def ask() -> tuple[str, str]:
        with openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="x",
            max_retries=0,
            http_client=httpx.Client(trust_env=False),
        ) as client:
            whole = client.completions.create(model="tiny", prompt="Say", max_tokens=4)
            parts = client.completions.create(model="tiny", prompt="Say", max_tokens=4, stream=True)
            return whole.choices[0].text, "".join(part.choices[0].text for part in parts)

    assert await asyncio.to_thread(ask) == ("Hell", "Hell")


async def test_completion_defaults_to_16_tokens_and_ends_by_length(rig, client):
    rig.say("x" * 50)
    reply = await client.completions.create(model="tiny", prompt="Say")

    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("x" * 16, "length")


async def test_chat_defaults_to_the_rest_of_the_context(rig, client):
    await ask(client)
    spec = rig.backend.calls[0][0][0]

    assert spec.sampling.max_tokens == 200 - len(spec.prompt)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([0, 1], [[0, 1]]),
        ([[0, 1], [2]], [[0, 1], [2]]),
    ],
)
async def test_completion_takes_every_form_of_prompt(rig, client, prompt, expected):
    reply = await client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    requested = sorted(calls[0][0].prompt for calls in rig.backend.calls)

    assert requested == sorted(
        [
            rig.tokenizer._tokenizer.encode(item).ids if isinstance(item, str) else item
            for item in expected
        ]
    )
    assert [choice.index for choice in reply.choices] == list(range(len(expected)))


async def test_n_choices_have_their_own_ids_and_seeds(rig, client):
    reply = await ask(client, n=3, seed=2**63 - 1)
    (specs, prefill) = rig.backend.calls[0]

    assert [choice.message.content for choice in reply.choices] == ["Hello, world!"] * 3
    assert [spec.sampling.seed for spec in specs] == [2**63 - 1, 0, 1]
    assert [spec.request_id for spec in specs] == [f"{reply.id}-{i}" for i in range(3)]
    assert prefill == "auto"


async def test_seed_is_drawn_when_none_is_given(rig, client):
    for _ in range(2):
        await client.completions.create(model="tiny", prompt="a")
    seeds = [specs[0].sampling.seed for specs, _ in rig.backend.calls]

    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_every_sampling_field_reaches_the_engine(rig, client):
    rig.policy = PolicyConfig(allow_client_priority=True)
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 1,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "priority": -3,
        "pdcluster": {"prefill": "remote"},
    }
    await ask(
        client,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"3": -100},
        seed=4,
        user="me",
        extra_body=extra,
    )
    (specs, prefill) = rig.backend.calls[0]
    sampling = specs[0].sampling

    assert (prefill, specs[0].priority, sampling.max_tokens, sampling.seed) == ("remote", -3, 9, 4)
    assert sampling.temperature == 0.5
    assert sampling.top_p == 0.9
    assert sampling.top_k == 5
    assert sampling.min_p == 0.1
    assert sampling.presence_penalty == 1.0
    assert sampling.frequency_penalty == -1.0
    assert sampling.repetition_penalty == 1.2
    assert sampling.logit_bias == {3: -100.0}
    assert sampling.min_tokens == 1
    assert sampling.stop_token_ids == [7]
    assert (sampling.eos_token_ids, sampling.ignore_eos, sampling.logprobs) == ([258], True, None)


async def test_top_p_zero_is_greedy(rig, client):
    await client.completions.create(model="tiny", prompt="a", top_p=0, temperature=1.5)
    sampling = rig.backend.calls[0][0][0].sampling

    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


async def test_chat_prompt_is_the_template_and_takes_text_parts(rig, client):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "name": "n", "content": parts},
    ]
    await client.chat.completions.create(model="tiny", messages=messages)
    text = (
        "<|im_start|>system\nd<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )

    assert rig.backend.calls[0][0][0].prompt == rig.tokenizer._tokenizer.encode(text).ids


@pytest.mark.parametrize("n", [1, 2])
async def test_stop_string_ends_one_prompt_and_the_others_go_on(rig, client, n):
    """A prompt whose choices have all ended is closed; nothing more of it is computed."""
    encoded = [i for c in "one END two" for i in rig.tokenizer._tokenizer.encode(c).ids]
    rig.backend.script = lambda spec: [
        *(encoded if len(spec.prompt) == 1 else encoded[:4] * 9),
        258,
    ]
    reply = await client.completions.create(
        model="tiny", prompt=["x", "yy"], n=n, stop="END", max_tokens=60
    )

    assert [choice.text for choice in reply.choices] == ["one "] * n + ["one " * 9] * n
    assert [choice.finish_reason for choice in reply.choices] == ["stop"] * (2 * n)
    assert rig.backend.cancelled.is_set()
    assert rig.backend.aborted == [f"{reply.id}-{i}" for i in range(n - 1)]
