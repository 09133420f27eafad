"""The official client, unchanged, against a real socket."""

import asyncio

import httpx
import openai
import pytest

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


async def test_seed_is_drawn_when_none_is_given(rig, client):
    for _ in range(2):
        await client.completions.create(model="tiny", prompt="a")
    seeds = [specs[0].sampling.seed for specs, _ in rig.backend.calls]

    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**63 for seed in seeds)


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
