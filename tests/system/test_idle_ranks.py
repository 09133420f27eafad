"""A server process before eight ranks with nothing to do does next to nothing."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.ports import free_ports
from tests.system.client import MODEL
from tests.system.cluster import NewCluster
from tests.system.idle import MAX_SHARE
from tests.system.worker_process import WorkerProcess
from tests.worker.stock_engine.fake_vllm import FakeVllm, fake_vllm, metrics_of

RANKS = 8
ASKED_SECONDS = os.environ.get("PDCLUSTER_IDLE_SECONDS", "")
"""Time to measure, where a figure is wanted; with eight engines of our own too."""

WINDOW_SECONDS = float(ASKED_SECONDS or 20)
FILLER_LINES = 440  # of each rank's histograms, as vLLM 0.32 has them


def page() -> str:
    filler = "".join(
        f'vllm:request_seconds_bucket{{engine="{rank}",le="{number}.0",model_name="m"}} 0.0\n'
        for rank in range(RANKS)
        for number in range(FILLER_LINES)
    )
    return filler + metrics_of(RANKS)


async def serve(opened: "list[FakeVllm]", has_opened: threading.Event) -> None:
    async with fake_vllm() as fake:
        fake.pages |= {
            "/metrics": page().encode(),
            "/version": json.dumps({"version": "0.32.0"}).encode(),
            "/v1/models": json.dumps({"data": [{"id": MODEL, "max_model_len": 99}]}).encode(),
        }
        opened.append(fake)
        has_opened.set()
        while True:
            await (await fake.calls.get()).answer(b"{}")


@contextmanager
def stock_ranks() -> Iterator[int]:
    """Its port."""
    opened: list[FakeVllm] = []
    has_opened = threading.Event()
    loop = asyncio.new_event_loop()
    serving = loop.create_task(serve(opened, has_opened))
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([serving])))
    thread.start()
    try:
        assert has_opened.wait(10)
        yield opened[0].port
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(10)
        loop.close()


def share_at_rest(worker: WorkerProcess) -> float:
    """Share of one core that its server process takes."""
    worker.start()
    worker.wait_ready()
    assert len(worker.record["engines"]) == RANKS
    process = psutil.Process(worker.process.pid)
    time.sleep(5)  # its start is over
    before = process.cpu_times()

    time.sleep(WINDOW_SECONDS)  # the window that is measured, not a wait for something

    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    print(f"\n{used / WINDOW_SECONDS:.2%} of a core over {WINDOW_SECONDS:g} s")
    return used / WINDOW_SECONDS


def test_a_server_process_before_eight_stock_ranks_rests(open_cluster: NewCluster) -> None:
    with stock_ranks() as port, open_cluster("eight") as cluster:
        worker = cluster.add_worker("mixed", "eight-mixed-0", start=False)
        ports = {
            "port": port,
            "kvEventsPort": free_ports(RANKS),
            "sideChannelPort": free_ports(RANKS),
        }
        worker.settings["engine"] = {"type": "vllm", "dataParallelSize": RANKS, "vllm": ports}
        assert share_at_rest(worker) < MAX_SHARE


@pytest.mark.skipif(not ASKED_SECONDS, reason="eight engines take minutes to start on few cores")
def test_a_server_process_before_eight_engines_rests(open_cluster: NewCluster) -> None:
    with open_cluster("eights") as cluster:
        worker = cluster.add_worker("mixed", "eights-mixed-0", start=False, dataParallelSize=RANKS)
        worker.settings["listen"]["kv"] = 0
        assert share_at_rest(worker) < MAX_SHARE
