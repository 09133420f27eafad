"""Two ranks of one stock engine are two engines of its worker, over a small HTTP server and real
sockets for their events.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from pdcluster_schema.ports import join_address
from pdcluster_worker.errors import WRONG_SETTING
from pdcluster_worker.messages.block_hash import block_hashes
from pdcluster_worker.messages.engine import Prefill, Submit
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, TransferTarget
from pdcluster_worker.serving.engines.client import EngineDiedError, EngineStalledError
from pdcluster_worker.serving.engines.engines import Engine, Engines
from pdcluster_worker.serving.engines.group import EngineGroup
from pdcluster_worker.serving.engines.stock_child import StockServer
from tests.worker.serving.engines.stock_server import config, pages, params_of, warm_up
from tests.worker.stock_engine.fake_vllm import (
    Call,
    FakeVllm,
    end_events,
    fake_vllm,
    metrics_of,
    prefill_answer,
    tokens_event,
)
from tests.worker.stock_engine.rig import until

pytestmark = pytest.mark.processes

PROMPT = list(range(100, 116))  # four blocks
SILENT = "import time; time.sleep(3600)"


class Ranks:
    def __init__(self, fake: FakeVllm, folder: Path, *command: str) -> None:
        self.fake = fake
        self.config = config(folder, fake.port, *command, size=2)
        server = StockServer(self.config)
        self.group = EngineGroup(2, server.ranks.__getitem__, lambda port: join_address("h", port))
        self._events = zmq.asyncio.Context()

    @property
    def engines(self) -> Engines:
        return self.group.engines

    async def ready(self) -> None:
        await self.group.start()
        self.group.begin("float32")
        await warm_up(self.fake, size=2)
        await asyncio.wait_for(self.group.ready(), 10)

    async def cached(self, rank: int, tokens: list[int]) -> None:
        """The rank says that it has cached a prompt."""
        socket = self._events.socket(zmq.PUB)
        socket.connect(f"tcp://127.0.0.1:{self.config.engine.vllm.kv_events_port + rank}")
        count = len(tokens) // 4
        event = {
            "type": "BlockStored",
            "block_hashes": list(range(count)),
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": 4,
            "group_idx": 0,
        }
        hashes, engine = block_hashes(tokens, 4), list(self.engines)[rank]
        sequence = 0
        while self.engines.cached_tokens(engine, hashes, 99) < count * 4:  # until it is connected
            payload = msgspec.msgpack.encode([0.5, [event], rank])
            await socket.send_multipart([b"", sequence.to_bytes(8, "big"), payload])
            sequence += 1
            await asyncio.sleep(0.05)
        socket.close(linger=0)

    async def call(self) -> Call:
        return await asyncio.wait_for(self.fake.calls.get(), 10)

    async def stop(self) -> None:
        await self.group.stop()
        self._events.destroy(linger=0)


@asynccontextmanager
async def two(folder: Path, *command: str) -> AsyncIterator[Ranks]:
    async with fake_vllm() as fake:
        fake.pages = pages(**{"/metrics": metrics_of(2)})
        ranks = Ranks(fake, folder, *command)
        try:
            yield ranks
        finally:
            await ranks.stop()


def spec(request_id: str, tokens: list[int]) -> RequestSpec:
    return RequestSpec(request_id, tokens, SamplingParams(max_tokens=1, seed=0))


def rank_of(call: Call) -> str:
    return call.headers["x-data-parallel-rank"]


async def test_each_rank_is_an_engine_with_ports_and_numbers_of_its_own(tmp_path):
    async with two(tmp_path) as ranks:
        ranks.fake.pages["/metrics"] = (
            metrics_of(2)
            .replace('perc{engine="1",model_name="m"} 0.25', 'perc{engine="1",model_name="m"} 0.5')
            .encode()
        )
        await ranks.ready()
        first, second = ranks.engines
        await until(lambda: all(engine.client.stats for engine in ranks.engines))

        assert (first.kv_address, second.kv_address) == ("h:8200", "h:8201")
        assert first.facts.engine_id != second.facts.engine_id
        assert [engine.facts.num_blocks for engine in ranks.engines] == [16, 16]
        assert [used(engine) for engine in ranks.engines] == [4, 8]
        assert [record.kv_address for record in ranks.engines.records()] == ["h:8200", "h:8201"]


def used(engine: Engine) -> int:
    assert engine.client.stats is not None
    return engine.client.stats.blocks["in_use"]


async def test_each_rank_is_warmed_up(tmp_path):
    async with two(tmp_path) as ranks:
        await ranks.group.start()
        ranks.group.begin("float32")
        calls = await warm_up(ranks.fake, size=2)

    assert sorted(rank_of(call) for call in calls) == ["0"] * 4 + ["1"] * 4
    assert len({call.body["request_id"] for call in calls}) == 6  # two are of one prompt


async def test_a_request_goes_to_the_rank_that_has_its_prefix(tmp_path):
    async with two(tmp_path) as ranks:
        await ranks.ready()
        await ranks.cached(1, PROMPT)
        for number in range(3):
            handle = ranks.engines.open(f"r{number}", lambda: block_hashes(PROMPT, 4))
            handle.send(Submit(spec(f"r{number}", PROMPT)))
            call = await ranks.call()
            await call.begin()
            await call.send(tokens_event(7, reason="length") + end_events())

            assert rank_of(call) == "1"
            assert (await asyncio.wait_for(handle.outputs.get(), 10)).token_id == 7
            handle.close()
            while handle.engine.score:
                await asyncio.sleep(0.01)


async def test_other_requests_go_to_each_rank_in_turn(tmp_path):
    async with two(tmp_path) as ranks:
        await ranks.ready()
        seen = []
        for number in range(4):
            handle = ranks.engines.open(f"r{number}", list)
            handle.send(Submit(spec(f"r{number}", [number])))
            seen.append(rank_of(await ranks.call()))

    assert sorted(seen) == ["0", "0", "1", "1"]


async def test_a_prefill_s_handle_is_that_of_its_rank(tmp_path):
    async with two(tmp_path) as ranks:
        await ranks.ready()
        await ranks.cached(1, PROMPT)
        handle = ranks.engines.open("r", lambda: block_hashes(PROMPT, 4))
        handle.send(Prefill(spec("r", PROMPT), TransferTarget(b"e" * 16, "peer", ["h:1"], 0, [])))
        call = await ranks.call()
        await call.answer(prefill_answer())
        await asyncio.wait_for(handle.outputs.get(), 10)

    assert rank_of(call) == "1"
    assert params_of(call)["max_tokens"] == 1


async def test_the_end_of_the_server_is_that_of_all_ranks_and_none_is_started_again(tmp_path):
    async with two(tmp_path, sys.executable, "-c", SILENT) as ranks:
        await ranks.ready()
        second = list(ranks.engines)[1]

        ranks.group.kill(second, "it answers nothing")

        ended = await asyncio.wait_for(ranks.group.ended, 10)
        assert ended.client.died == "it answers nothing"
        assert ranks.engines.problem == "it answers nothing"
        assert await asyncio.wait_for(ended.exit_status, 10) == 1


async def test_ranks_of_another_container_stay_until_it_restarts(tmp_path):
    async with two(tmp_path) as ranks:
        await ranks.ready()
        ranks.engines.first.client.stall("it makes no step")
        assert ranks.engines.problem is None
        ranks.group.kill(ranks.engines.first, "it answers nothing")
        assert not ranks.group.ended.done()
        assert ranks.engines.problem is not None  # the probe of its container fails
        assert ranks.engines.is_stalled

        restarted = metrics_of(2).replace("1.79542970805e+09", "1.8e+09")
        ranks.fake.pages["/metrics"] = restarted.encode()
        await asyncio.wait_for(ranks.group.ended, 10)


async def test_requests_of_well_ranks_may_go_elsewhere_when_their_server_restarts(tmp_path):
    async with two(tmp_path) as ranks:
        await ranks.ready()
        first, second = ranks.engines
        outputs = second.client.open("r")
        first.client.stall("it makes no step")
        ranks.group.kill(first, "it makes no step: killed")
        with pytest.raises(EngineStalledError):
            await asyncio.wait_for(outputs.get(), 10)


async def test_a_rank_that_stalls_in_a_drain_ends_no_request_of_the_others(tmp_path):
    async with two(tmp_path) as ranks:
        await ranks.ready()
        first, second = ranks.engines
        second.client.stall("it makes no step")
        ranks.group.leave()
        ranks.group.kill(second, "it makes no step: killed")

        assert first.client.problem is None
        assert second.client.is_lost
        assert ranks.group.failed is None


async def test_a_port_of_a_rank_that_is_taken_is_a_wrong_setting(tmp_path):
    async with two(tmp_path, sys.executable, "-c", SILENT) as ranks:
        port = ranks.config.engine.vllm.kv_events_port + 1
        taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
        try:
            await ranks.group.start()
            ranks.group.begin("float32")
            with pytest.raises(
                EngineDiedError, match=f"kvEventsPort: 127.0.0.1:{port} cannot be used"
            ):
                await asyncio.wait_for(ranks.group.ready(), 10)
            assert (await asyncio.wait_for(ranks.group.ended, 10)).exit_status.result() == (
                WRONG_SETTING
            )
        finally:
            taken.close()
