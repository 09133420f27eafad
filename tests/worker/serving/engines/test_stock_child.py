"""A stock engine from its start to its end, over a small HTTP server in its place."""

import asyncio
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdcluster_worker.config.worker import ModelConfig, Role, WorkerConfig
from pdcluster_worker.errors import WRONG_SETTING, ModelError, RequestError
from pdcluster_worker.messages.engine import Submit
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.serving.engines.client import EngineDiedError
from pdcluster_worker.stock_engine import http
from pdcluster_worker.stock_engine.engine_api import VLLM_API, EngineApi
from pdcluster_worker.stock_engine.facts import StockFacts, read_facts, read_shape
from tests.make_tiny_model import make_tiny_model
from tests.ports import free_port
from tests.worker.serving.engines.stock_server import (
    config,
    pages,
    params_of,
    served,
    started,
    started_by,
    warm_up,
)
from tests.worker.stock_engine.fake_vllm import end_events, fake_vllm, tokens_event

pytestmark = pytest.mark.processes


async def facts_of(
    folder: Path, *, version: str = "0.32.0", api: EngineApi = VLLM_API, **settings: Any
) -> StockFacts:
    """Facts that a worker with these settings reads."""
    async with fake_vllm() as fake:
        fake.pages = pages(**{"/version": json.dumps({"version": version})})
        given = msgspec.structs.replace(config(folder, fake.port), **settings)
        reading = asyncio.create_task(read_facts([http.StockClient(fake.port)], given, api))
        await warm_up(fake)
        (facts,) = await asyncio.wait_for(reading, 10)
        return facts


async def test_what_is_compiled_at_first_use_is_used_before_a_worker_is_ready(tmp_path):
    async with fake_vllm() as fake, started(tmp_path, fake.port) as child:
        fake.pages = pages()
        sampled, scored, *plain = await warm_up(fake)
        await asyncio.wait_for(child.client.ready(), 10)

    assert params_of(sampled)["logprobs"] == 2
    assert params_of(scored)["prompt_logprobs"] == 1
    assert len({tuple(call.body["token_ids"]) for call in plain}) == 2


async def test_a_whole_step_is_given_the_time_that_a_short_prompt_takes_in_proportion(tmp_path):
    async with fake_vllm() as fake, started(tmp_path, fake.port) as child:
        fake.pages = pages()
        for _ in range(4):
            call = await asyncio.wait_for(fake.calls.get(), 10)
            await asyncio.sleep(0.1)
            await call.answer(b"{}", 200)
        ready = await asyncio.wait_for(child.client.ready(), 10)

    assert ready.longest_step_seconds >= 0.1 * 2048 / 64


@pytest.mark.parametrize("path", ["/version", "/v1/models", "/metrics"])
async def test_one_late_answer_costs_no_start(tmp_path, monkeypatch, path):
    monkeypatch.setattr(http, "GET_SECONDS", 0.2)
    async with fake_vllm() as fake:
        fake.pages, fake.late = pages(), {path: 1}
        async with started(tmp_path, fake.port) as child:
            await warm_up(fake)
            await asyncio.wait_for(child.client.ready(), 10)

    assert fake.late == {path: 0}


async def test_an_engine_whose_facts_are_late_each_time_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(http, "GET_SECONDS", 0.1)
    async with fake_vllm() as fake:
        fake.pages, fake.late = pages(), {"/version": 99}
        async with started(tmp_path, fake.port) as child:
            with pytest.raises(EngineDiedError, match=r"no answer to /version in 0\.1 s"):
                await asyncio.wait_for(child.client.ready(), 10)
            assert child.exit_status.result() == 1


@pytest.mark.parametrize(
    ("role", "transport"), [("mixed", ""), ("decode", "nixl"), ("prefill", "nixl")]
)
async def test_a_mixed_worker_s_engine_moves_no_kv(tmp_path, role, transport):
    assert (await facts_of(tmp_path, role=role)).ready.transport == transport


async def test_a_build_for_cpus_on_a_pool_of_gpus_says_that_it_computes_on_a_cpu(tmp_path):
    facts = await facts_of(tmp_path, version="0.32.0+cpu", gpu="B200")

    assert facts.ready.device == DeviceFacts(
        "cpu", "cpu", operations="vllm 0.32.0+cpu", model_code="vllm"
    )


@pytest.mark.parametrize(
    ("version", "given", "note"),
    [
        ("0.33.0", {"allow_unknown_version": True}, ""),
        (
            "0.99.1",
            {"allow_unknown_version": True},
            "vLLM 0.99.1 is not known here: use 0.30 to 0.33; served, since "
            "engine.allowUnknownVersion is true",
        ),
        ("0.32.0+cpu", {"tagged_version": "0.32.0"}, ""),
        (
            "0.31.0",
            {"tagged_version": "0.32.0"},
            "is vLLM 0.31.0, and the tag of its image says 0.32.0; give the tag that it is",
        ),
    ],
)
async def test_a_worker_says_what_is_odd_of_its_engine_s_version(tmp_path, version, given, note):
    engine = config(tmp_path, 1).engine
    engine = msgspec.structs.replace(engine, vllm=msgspec.structs.replace(engine.vllm, **given))
    facts = await facts_of(tmp_path, version=version, engine=engine)

    assert facts.ready.device.engine_note == note


async def test_a_request_may_be_as_long_as_its_engine_s_blocks_allow(tmp_path):
    api = replace(VLLM_API, longest=lambda length, scrape: min(length, scrape.num_blocks))

    assert (await facts_of(tmp_path, api=api)).ready.max_model_len == 16


async def test_a_server_that_serves_the_model_is_an_engine(tmp_path):
    async with served(tmp_path) as (fake, child):
        ready = await child.client.ready()
        mailbox = child.client.open("r")
        child.client.send(Submit(RequestSpec("r", [1], SamplingParams(max_tokens=1, seed=0))))
        call = await asyncio.wait_for(fake.calls.get(), 10)
        await call.begin()
        await call.send(tokens_event(7, reason="length") + end_events())
        token = await asyncio.wait_for(mailbox.get(), 10)

    assert (ready.num_blocks, ready.geometry.block_size, ready.max_model_len) == (16, 4, 99)
    assert (ready.geometry.kind, ready.dtype) == ("vllm-0.32.0-nixl", "bfloat16")
    assert ready.restarts_grammar
    assert isinstance(token, Token)
    assert (token.token_id, token.finish_reason) == (7, "length")


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (
            {"/version": json.dumps({"version": "0.99.1"})},
            "not known here: use 0.30 to 0.33, or set engine",
        ),
        (
            {"/v1/models": json.dumps({"data": [{"id": "other"}]})},
            "the engine serves other, not m: start it with --served-model-name m",
        ),
    ],
)
async def test_a_server_of_another_kind_is_a_wrong_setting(tmp_path, over, message):
    async with fake_vllm() as fake, started(tmp_path, fake.port) as child:
        fake.pages = pages(**over)

        with pytest.raises(EngineDiedError, match=message):
            await asyncio.wait_for(child.client.ready(), 10)
        assert child.exit_status.result() == WRONG_SETTING


@pytest.mark.parametrize(
    ("status", "message", "exit_status"),
    [
        (404, r"vLLM 0\.32\.0 has no /inference/v1/generate for this model: give", WRONG_SETTING),
        (500, "the engine answered 500 to /inference/v1/generate: {}", 1),
    ],
)
async def test_an_engine_that_generates_nothing_is_none(tmp_path, status, message, exit_status):
    async with fake_vllm() as fake, started(tmp_path, fake.port) as child:
        fake.pages = pages()
        for _ in range(3):
            await (await asyncio.wait_for(fake.calls.get(), 10)).answer(b"{}", status)

        with pytest.raises(EngineDiedError, match=message):
            await asyncio.wait_for(child.client.ready(), 10)
        assert child.exit_status.result() == exit_status


def of_embeddings(folder: Path, port: int, role: Role) -> WorkerConfig:
    model = ModelConfig(name="m", path=str(folder), frontend="engine")
    return msgspec.structs.replace(config(folder, port), role=role, model=model)


async def test_a_model_that_makes_embeddings_serves_and_is_given_no_text(tmp_path):
    async with fake_vllm() as fake:
        fake.pages = pages()
        async with started_by(of_embeddings(tmp_path, fake.port, "mixed")) as child:
            await (await asyncio.wait_for(fake.calls.get(), 10)).answer(b"{}", 400)
            ready = await asyncio.wait_for(child.client.ready(), 10)
            outputs = child.client.open("r")
            child.client.send(Submit(RequestSpec("r", [1], SamplingParams(max_tokens=1, seed=1))))
            with pytest.raises(RequestError, match="makes embeddings, and generates no text"):
                await asyncio.wait_for(outputs.get(), 10)

            assert fake.calls.empty()
            child.client.stall("it makes no step")
            child.client.ping()
            probe = await asyncio.wait_for(fake.calls.get(), 10)

    assert (ready.max_model_len, probe.body) == (99, {"model": "m", "input": [1]})


async def test_an_engine_that_has_stalled_is_sent_a_prompt_of_one_token(tmp_path):
    async with served(tmp_path) as (fake, child):
        child.client.stall("it makes no step")
        child.client.ping()
        probe = await asyncio.wait_for(fake.calls.get(), 10)

    assert probe.body["token_ids"] == [1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_model_that_makes_embeddings_is_for_mixed_workers(tmp_path, role):
    async with fake_vllm() as fake:
        fake.pages = pages()
        async with started_by(of_embeddings(tmp_path, fake.port, role)) as child:
            await (await asyncio.wait_for(fake.calls.get(), 10)).answer(b"{}", 400)
            with pytest.raises(EngineDiedError, match=r"has no decode: give it roles\.mixed alone"):
                await asyncio.wait_for(child.client.ready(), 10)
            assert child.exit_status.result() == WRONG_SETTING


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        # deepseek-ai/DeepSeek-R1, config.json: MLA
        (
            {
                "hidden_size": 7168,
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "num_key_value_heads": 128,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            (61, 1, 576),
        ),
        # Qwen/Qwen3-32B
        (
            {
                "hidden_size": 5120,
                "num_hidden_layers": 64,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
            (64, 8, 128),
        ),
        # openai/gpt-oss-120b
        (
            {
                "hidden_size": 2880,
                "num_hidden_layers": 36,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
            },
            (36, 8, 64),
        ),
    ],
)
def test_kv_sizes_are_those_of_the_attention(tmp_path, tiny_folder, config, sizes):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "copy")
    (folder / "config.json").write_text(json.dumps(config))
    shape = read_shape(folder)

    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == sizes


def test_a_vocabulary_that_the_config_does_not_name_is_not_known(tmp_path, tiny_folder):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "copy")
    (folder / "config.json").write_text('{"text_config": {"hidden_size": 64}, "llm_config": null}')

    assert read_shape(folder).vocab_size == 0


def test_a_config_that_is_no_map_is_refused_with_its_folder(tmp_path):
    (tmp_path / "config.json").write_text("[]")

    with pytest.raises(ModelError, match="has no readable"):
        read_shape(tmp_path)


def test_other_weights_of_the_same_shape_are_no_pair(tmp_path, tiny_folder):
    other = make_tiny_model("llama", tmp_path / "other", seed=1)

    assert read_shape(other).fingerprint != read_shape(tiny_folder("llama")).fingerprint


def test_a_copy_that_another_tool_saved_is_a_pair(tmp_path, tiny_folder):
    copied = shutil.copytree(tiny_folder("llama"), tmp_path / "copy")
    document = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(document | {"transformers_version": "0"}))

    assert read_shape(copied).fingerprint == read_shape(tiny_folder("llama")).fingerprint


async def test_weights_that_cannot_be_read_are_a_wrong_setting(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    async with fake_vllm() as fake, started(tmp_path, fake.port) as child:
        fake.pages = pages()
        with pytest.raises(EngineDiedError, match="is not a safetensors file"):
            await asyncio.wait_for(child.client.ready(), 10)
        assert child.exit_status.result() == WRONG_SETTING


async def test_a_command_that_ends_says_its_last_lines(tmp_path):
    program = "print('loading'); print('no such device'); raise SystemExit(4)"
    async with started(tmp_path, free_port(), sys.executable, "-c", program) as child:
        with pytest.raises(EngineDiedError) as raised:
            await asyncio.wait_for(child.client.ready(), 30)

    assert "status 4, after saying: loading | no such device" in str(raised.value)
    assert child.exit_status.result() == 1


async def test_what_an_engine_waits_for_is_reported_until_it_serves(tmp_path):
    async with fake_vllm() as fake, started(tmp_path, fake.port) as child:
        output: list[str] = []
        child.client.on_wait = output.append
        del fake.pages["/health"]
        async with asyncio.timeout(10):
            while not output:
                await asyncio.sleep(0.05)
        fake.pages = pages()
        await warm_up(fake)
        await asyncio.wait_for(child.client.ready(), 10)

    assert output[0].startswith("the engine does not serve yet: the engine answered 404")
    assert output[-1] == "the engine answers /health, and warms up"


SILENT = "print('waiting for a device', flush=True); import time; time.sleep(3600)"


async def test_a_command_that_never_serves_is_ended_with_its_last_lines(tmp_path):
    silent = (sys.executable, "-c", SILENT)
    async with started(tmp_path, free_port(), *silent, startup_timeout_seconds=3) as child:
        with pytest.raises(EngineDiedError, match=r"not serve after 3 s.*waiting for a device"):
            await asyncio.wait_for(child.client.ready(), 30)

    assert child.exit_status.result() == 1


async def test_a_warm_up_that_gets_no_answer_is_ended_likewise(tmp_path):
    async with (
        fake_vllm() as fake,
        started(
            tmp_path, fake.port, sys.executable, "-c", SILENT, startup_timeout_seconds=3
        ) as child,
    ):
        fake.pages = pages()
        with pytest.raises(EngineDiedError, match=r"not serve after 3 s.*waiting for a device"):
            await asyncio.wait_for(child.client.ready(), 30)

    assert fake.calls.qsize() == 1
    assert child.exit_status.result() == 1


async def test_a_program_that_is_not_there_is_a_wrong_setting(tmp_path):
    async with started(tmp_path, free_port(), "/no/such/vllm") as child:
        with pytest.raises(EngineDiedError, match="there is no program /no/such/vllm"):
            await asyncio.wait_for(child.client.ready(), 10)
        assert child.exit_status.result() == WRONG_SETTING


async def test_an_adapter_that_does_not_fit_is_a_wrong_setting(tmp_path):
    async with started(tmp_path, free_port(), "/no/such", adapters={"sql": str(tmp_path)}) as child:
        with pytest.raises(EngineDiedError, match=r"adapter sql: .* is no folder of a LoRA"):
            await asyncio.wait_for(child.client.ready(), 10)
        assert child.exit_status.result() == WRONG_SETTING


async def test_an_engine_that_ends_fails_its_requests(tmp_path):
    async with served(tmp_path, sys.executable, "-c", SILENT) as (_, child):
        mailbox = child.client.open("r")

        child.kill("it answers nothing")

        with pytest.raises(EngineDiedError, match="it answers nothing"):
            await asyncio.wait_for(mailbox.get(), 10)
        await asyncio.wait_for(child.gone(), 10)


async def test_an_engine_of_another_container_is_not_killed(tmp_path):
    async with served(tmp_path) as (_, child):
        child.kill("it answers nothing")

        assert child.client.died is None
        assert not child.killed.done()


async def test_an_engine_whose_numbers_cannot_be_read_has_ended(tmp_path):
    async with served(tmp_path) as (fake, child):
        fake.pages["/metrics"] = b"vllm:num_requests_running NaN\n"
        mailbox = child.client.open("r")
        child.client.send(Submit(RequestSpec("r", [1], SamplingParams(max_tokens=1, seed=0))))

        with pytest.raises(EngineDiedError, match="its client failed"):
            await asyncio.wait_for(mailbox.get(), 10)
        assert child.exit_status.result() == 1
