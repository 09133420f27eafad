"""Calls of vLLM's front end: what it refuses, what it lacks, and one that is gone."""

import asyncio
import json

import pytest

from pdcluster_worker.errors import ConfigError, RequestError
from pdcluster_worker.stock_engine import front_end
from pdcluster_worker.stock_engine.front_end import EMBEDDINGS, PATHS, ask, check_endpoints
from pdcluster_worker.stock_engine.http import HttpFailedError, StockClient
from tests.worker.stock_engine.fake_vllm import FakeVllm, fake_vllm


async def answered(fake: FakeVllm, status: int, data: bytes) -> bytes:
    asking = asyncio.create_task(ask(StockClient(fake.port), "/detokenize", b'{"tokens": [1]}'))
    call = await asyncio.wait_for(fake.calls.get(), 10)
    assert call.body == {"tokens": [1]}
    await call.answer(data, status)
    return await asking


async def test_an_answer_and_a_refusal_are_passed_on() -> None:
    def error(message: str, param: str) -> bytes:
        said = {"message": message, "param": param, "code": 400}
        return json.dumps({"error": said}).encode()

    async with fake_vllm() as fake:
        assert await answered(fake, 200, b"body") == b"body"
        with pytest.raises(RequestError, match="the engine refuses the request: bad role") as e:
            await answered(fake, 400, error("bad role", "messages"))
        assert (e.value.param, e.value.code) == ("messages", None)
        for named in ("input_text", "input_tokens"):
            with pytest.raises(RequestError, match="maximum context length is") as e:
                await answered(fake, 400, error("This maximum context length is 9", named))
            assert (e.value.param, e.value.code) == (None, "context_length_exceeded")
        with pytest.raises(HttpFailedError, match="the engine answered 500 to /detokenize"):
            await answered(fake, 500, b"{}")


async def test_an_engine_that_is_gone_or_silent_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fake_vllm() as fake:
        monkeypatch.setattr(front_end, "ASK_SECONDS", 0.01)
        with pytest.raises(HttpFailedError, match=r"no answer to /detokenize in 0\.01 s"):
            await ask(StockClient(fake.port), "/detokenize", b"{}")
    with pytest.raises(HttpFailedError, match="cannot connect"):
        await ask(StockClient(fake.port), "/detokenize", b"{}")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (EMBEDDINGS, "generates text, and makes no embeddings: ask a PDCluster whose model does"),
        (PATHS[0], "makes embeddings, and generates no text: use /v1/embeddings"),
    ],
)
async def test_an_endpoint_that_the_model_lacks_is_a_404_with_the_way_out(
    path: str, words: str
) -> None:
    async with fake_vllm() as fake:
        asking = asyncio.create_task(ask(StockClient(fake.port), path, b"{}"))
        await (await asyncio.wait_for(fake.calls.get(), 10)).answer(b"{}", 404)
        with pytest.raises(RequestError, match=words) as e:
            await asking

    assert e.value.status == 404


@pytest.mark.parametrize("status", [403, 404, 405])
async def test_an_image_without_the_endpoints_is_refused_with_the_fix(status: int) -> None:
    async with fake_vllm() as fake:
        checking = asyncio.create_task(check_endpoints(StockClient(fake.port), "0.29.0"))
        for found in (400, status):
            await (await asyncio.wait_for(fake.calls.get(), 10)).answer(b"{}", found)
        with pytest.raises(ConfigError, match=rf"vLLM 0\.29\.0 has no {PATHS[1]}: use an image"):
            await checking


async def test_an_image_with_them_is_taken() -> None:
    async with fake_vllm() as fake:
        checking = asyncio.create_task(check_endpoints(StockClient(fake.port), "0.32.0"))
        for _ in PATHS:
            await (await asyncio.wait_for(fake.calls.get(), 10)).answer(b"{}", 400)
        await checking
