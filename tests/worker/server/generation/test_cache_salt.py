"""Requests that share cached blocks: those of one API key, and of one `cache_salt` of the client's
own.
"""

import doctest
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.server.generation import respond as module
from pdcluster_worker.server.generation.respond import cache_salt

ALICE, BOB = b"a" * 32, b"b" * 32
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "tiny", "prompt": ["Hi", "Ho"], "n": 2}

Asked = Callable[..., Awaitable[list[bytes]]]


def test_documented_examples_hold():
    assert doctest.testmod(module) == (0, 3)


def test_a_key_and_a_salt_of_the_client_s_own_are_kept_apart():
    """No pair of (key, salt) meets another, a missing one included."""
    pairs = [(key, own) for key in (b"", ALICE, BOB) for own in (None, "a", "b")]
    salts = [cache_salt(key, own, shared=False) for key, own in pairs]

    assert len(set(salts)) == len(pairs)
    assert {len(salt) for salt in salts[1:]} == {32}


def test_a_shared_cache_still_keeps_a_client_s_own_salts_apart():
    salts = {
        (key, own): cache_salt(key, own, shared=True)
        for key in (b"", ALICE)
        for own in (None, "a", "b")
    }

    assert salts[ALICE, "a"] == salts[b"", "a"] != salts[b"", "b"]
    assert salts[ALICE, None] == salts[b"", None] == b""


@pytest.fixture
async def requested(rig, tmp_path: Path) -> AsyncIterator[Asked]:
    """Sends a body with a key; returns the salts of the requests that reached the backend."""
    async with rig.keyed(tmp_path, "alice", "bob") as http:

        async def ask(key: str, body: dict[str, Any], *, shared: bool = False) -> list[bytes]:
            rig.policy = PolicyConfig().model_copy(update={"shared_prefix_cache": shared})
            rig.backend.calls.clear()
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            reply = await http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == 200, reply.text
            return [spec.cache_salt for specs, _ in rig.backend.calls for spec in specs]

        yield ask


async def test_two_keys_have_two_caches_in_both_apis(requested: Asked):
    alice, again, bob = [
        (await requested(key, CHAT))[0] for key in ("sk-alice", "sk-alice", "sk-bob")
    ]

    assert alice == again != bob
    assert await requested("sk-alice", COMPLETION) == [alice] * 4


async def test_a_request_carries_the_name_of_its_key(rig, requested: Asked):
    await requested("sk-bob", CHAT)

    assert [spec.tenant for specs, _ in rig.backend.calls for spec in specs] == ["bob"]


async def test_the_policy_gives_all_keys_one_cache_at_once(requested: Asked):
    assert [await requested(key, CHAT, shared=True) for key in ("sk-alice", "sk-bob")] == [
        [b""],
        [b""],
    ]
    assert await requested("sk-alice", CHAT) != [b""]


async def test_without_keys_there_is_one_cache_and_a_client_may_divide_it(rig, http):
    for extra in ({}, {"cache_salt": "tenant-1"}, {"cache_salt": "tenant-2"}, {"cache_salt": None}):
        assert (await http.post("/v1/chat/completions", json={**CHAT, **extra})).status_code == 200
    none, one, two, null = [specs[0].cache_salt for specs, _ in rig.backend.calls]

    assert (none, null) == (b"", b"")
    assert one != two
