"""Calls of vLLM's front end: what it refuses, what it lacks, and one that is gone."""

import asyncio
import json

import pytest

from pdcluster_worker.errors import ConfigError, RequestError
from pdcluster_worker.stock_engine import front_end
from pdcluster_worker.stock_engine.front_end import (
    EMBEDDINGS,
    PATHS,
    StockFrontEnd,
    ask,
    check_endpoints,
)
from pdcluster_worker.stock_engine.http import HttpFailedError, StockClient
from tests.worker.stock_engine.fake_vllm import FakeVllm, fake_vllm
from tests.worker.stock_engine.rig import Rig, rigged


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


async def embed(rig: Rig, inputs: list[str | list[int]], status: int = 200) -> None:
    """Ask for embeddings, see the engine's load meanwhile, and answer with 7 tokens."""
    body = json.dumps({"model": "m", "input": inputs}).encode()
    asking = asyncio.create_task(
        StockFrontEnd(rig.http, rig.reports.embedding).ask(EMBEDDINGS, body)
    )
    call = await rig.call()
    rig.reports.report()
    assert (rig.stats[-1].num_waiting, rig.reports.load.has_work) == (len(inputs), True)
    await call.answer(b'{"data": [], "usage": {"prompt_tokens": 7}}', status)
    await asking


async def test_embeddings_are_load_of_the_engine_that_makes_them() -> None:
    async with rigged() as rig:
        await embed(rig, ["a text", [1, 2, 3]])
        rig.reports.report()

    stats = rig.stats[-1]
    assert (stats.num_waiting, stats.num_running, stats.prompt_tokens) == (0, 0, 7)
    assert (stats.prefill_tokens, stats.num_steps, stats.generation_tokens) == (7, 1, 0)
    assert not rig.reports.load.has_work


async def test_embeddings_that_fail_are_no_load_any_more() -> None:
    async with rigged() as rig:
        with pytest.raises(HttpFailedError):
            await embed(rig, ["a text"], status=500)
        rig.reports.report()

    stats = rig.stats[-1]
    assert (stats.num_waiting, stats.prompt_tokens, stats.num_steps) == (0, 0, 0)


async def test_the_engine_is_to_make_progress_with_embeddings() -> None:
    async with rigged() as rig:
        with rig.reports.embedding([0]):
            assert rig.reports.load.is_to_step
        rig.page.first = [*rig.page.first, *rig.page.first]  # of two ranks it is not known which
        with rig.reports.embedding([0]):
            assert rig.reports.load.has_work
            assert not rig.reports.load.is_to_step
