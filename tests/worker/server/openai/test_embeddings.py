"""POST /v1/embeddings before an engine whose model makes them, over a played one.

tests/system/test_stock_embeddings.py asks a real vLLM.
"""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pdcluster_worker.server.openai.engine_front_end import EngineFrontEnd
from tests.worker.server.conftest import Rig
from tests.worker.server.openai.played_engine import PlayedEngine

PATH = "/v1/embeddings"


@pytest.fixture
def engine(rig: Rig) -> PlayedEngine:
    return PlayedEngine(rig.tokenizer)


@pytest.fixture
async def http(rig: Rig, engine: PlayedEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with rig.client(front_end=EngineFrontEnd(engine.ask)) as client:
        yield client


@pytest.mark.parametrize(
    ("given", "sent"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
async def test_inputs_go_to_the_engine_and_its_answer_comes_back(
    http: httpx.AsyncClient, given: Any, sent: Any
) -> None:
    more = {"encoding_format": "base64", "dimensions": 8, "truncate_prompt_tokens": -1}
    reply = await http.post(PATH, json={"model": "tiny", "input": given, "user": "me", **more})

    assert reply.status_code == 200, reply.text
    assert reply.json() == {"object": "list", "asked": {"model": "tiny", "input": sent, **more}}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other", "input": "a"}, 404, "model"),
        ({"model": "tiny"}, 400, "input"),
        ({"model": "tiny", "input": ["a"] * 257}, 400, "input"),
        ({"model": "tiny", "input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"model": "tiny", "input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
    ],
)
async def test_a_wrong_request_for_embeddings_is_refused(
    http: httpx.AsyncClient, engine: PlayedEngine, fields: Any, status: int, param: str
) -> None:
    reply = await http.post(PATH, json=fields)

    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
    assert not engine.calls


async def test_a_worker_that_is_not_ready_makes_no_embeddings(
    rig: Rig, http: httpx.AsyncClient
) -> None:
    rig.backend.not_ready = "its engine has yet to load"
    reply = await http.post(PATH, json={"model": "tiny", "input": "a"})

    assert reply.status_code == 503
    assert "its engine has yet to load" in reply.json()["error"]["message"]
