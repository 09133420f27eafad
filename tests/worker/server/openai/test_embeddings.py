"""POST /v1/embeddings before an engine whose model makes them, over a played one.

tests/system/test_stock_embeddings.py asks a real vLLM.
"""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdcluster_schema.qos import TenantSpec
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
    assert reply.json()["asked"] == {"model": "tiny", "input": sent, **more}


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


async def test_each_input_counts_as_a_request_and_has_its_time_and_a_line(
    rig: Rig, engine: PlayedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    times = iter([100.0])  # of the arrival
    front_end = EngineFrontEnd(engine.ask)
    async with rig.client(front_end=front_end, clock=lambda: next(times, 100.5)) as http:
        await http.post(PATH, json={"model": "tiny", "input": ["a", "b"]})
        await http.post(PATH, json={"model": "tiny", "input": "a", "dimensions": 0})

    assert rig.value("pdcluster_request_success_total", finish_reason="stop") == 2
    assert rig.value("pdcluster_e2e_request_latency_seconds_sum") == 1.0
    assert rig.value("pdcluster_time_to_first_token_seconds_count") == 0
    (line,) = [record for record in caplog.records if record.getMessage() == "embedded"]
    fields = line.__dict__["fields"]
    assert (fields["inputs"], fields["prompt_tokens"], fields["seconds"]) == (2, 10, 0.5)


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (TenantSpec(requests_per_second=2.0), "tenant_requests"),
        (TenantSpec(tokens_per_minute=9), "tenant_tokens"),  # 10 of texts are charged afterwards
    ],
)
async def test_embeddings_count_in_the_limits_of_their_key(
    rig: Rig, engine: PlayedEngine, tmp_path: Path, limits: TenantSpec, code: str
) -> None:
    rig.policy = rig.policy.model_copy(update={"tenants": {"batch": limits}})
    body = {"model": "tiny", "input": ["a", "b"]}
    front_end = EngineFrontEnd(engine.ask)
    async with rig.keyed(tmp_path, "batch", "other", front_end=front_end) as http:
        replies = [
            await http.post(PATH, json=body, headers={"authorization": f"Bearer sk-{key}"})
            for key in ("batch", "batch", "other")
        ]

    assert [reply.status_code for reply in replies] == [200, 429, 200]
    assert replies[1].json()["error"]["code"] == code
    assert int(replies[1].headers["retry-after"]) >= 1
    assert rig.value("pdcluster_qos_rejected_total", reason=code, priority="normal") == 1


async def test_more_inputs_than_may_ever_be_open_are_refused_by_name(
    rig: Rig, http: httpx.AsyncClient, engine: PlayedEngine
) -> None:
    rig.policy = rig.policy.model_copy(
        update={"tenant_defaults": TenantSpec(max_concurrent_requests=2)}
    )
    reply = await http.post(PATH, json={"model": "tiny", "input": ["a", "b", "c"]})

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")
    assert "3 inputs are more than the 2" in reply.json()["error"]["message"]
    assert not engine.calls
