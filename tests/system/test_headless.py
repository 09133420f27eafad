"""Headless engines: they join a worker over the network, and neither end survives in silence."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml

from tests.ports import free_port
from tests.system.cluster import NewCluster
from tests.system.waiting import wait_for
from tests.system.worker_process import WorkerProcess

MAX_TOKENS = 12
STREAMED = 400
END_SECONDS = 90.0


class Headless:
    """One headless engine of a head, with other settings by section if need be."""

    def __init__(self, folder: Path, head: WorkerProcess, **changed: str) -> None:
        self.log = folder / "headless.log"
        settings = {**head.settings, "listen": {"host": "127.0.0.1", "kv": 0}, **changed}
        (folder / "headless.yaml").write_text(yaml.safe_dump(settings))
        address = f"127.0.0.1:{head.settings['listen']['head']}"
        command = (
            sys.executable,
            "-m",
            "pdcluster_worker",
            "--engine-config",
            str(folder / "headless.yaml"),
            "--headless",
            "--head",
            address,
        )
        identity = {"POD_NAME": "node-b", "POD_NAMESPACE": "test", "POD_IP": "127.0.0.1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **identity}
            )

    def __enter__(self) -> "Headless":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def end(self) -> tuple[int, str]:
        """Wait for it; its exit status and the last line of its log."""
        return self.process.wait(END_SECONDS), self.log.read_text().splitlines()[-1]


@pytest.fixture
def head(new_cluster: NewCluster) -> WorkerProcess:
    cluster = new_cluster("heads")
    worker = cluster.add_worker("mixed", "head-0", start=False)
    worker.settings["listen"]["head"] = free_port()
    worker.start()
    cluster.wait_ready()
    return worker


def serving(head: WorkerProcess) -> dict[str, float]:
    return head.metrics().by_label("engine_up", "engine")


def test_headless_engine_serves_and_its_end_is_its_own(head, prompts, reference, tmp_path):
    with Headless(tmp_path, head, revision="r2") as stranger:
        status, said = stranger.end()
    assert status == 1
    assert said.endswith("refuses this engine: its revision is 'r2', the head's 'r1'")

    cases = [prompts(length) for length in (1, 16, 33, 100, 200, 320)]
    with Headless(tmp_path, head) as node:
        wait_for(lambda: serving(head) == {"0": 1, "1": 1}, END_SECONDS, node.log.read_text)
        with ThreadPoolExecutor(len(cases)) as pool:
            answers = list(
                pool.map(lambda prompt: head.client.complete(prompt, max_tokens=MAX_TOKENS), cases)
            )
        for prompt, answer in zip(cases, answers, strict=True):
            reference.check(prompt, answer.tokens)
        assert min(head.metrics().by_label("engine_requests_total", "engine").values()) > 0

        with ExitStack() as stack:
            streams = [
                stack.enter_context(head.client.stream(prompts(10), max_tokens=STREAMED))
                for _ in range(4)
            ]
            for stream in streams:
                stream.read_tokens(1)
            node.process.kill()
            lengths = [len(stream.read_all()) for stream in streams]
        assert lengths == [STREAMED] * 4  # two of them moved to the engine that is left
        assert "its node node-b is gone" in head.log_tail()
    head.wait_for(lambda: serving(head) == {"0": 1, "1": 0}, "the engine of the node is lost")

    with Headless(tmp_path, head) as node:  # its supervisor starts it again
        wait_for(lambda: serving(head) == {"0": 1, "1": 1}, END_SECONDS, node.log.read_text)
        head.kill()
        status, said = node.end()
    assert status == 1
    assert (
        f"the head 127.0.0.1:{head.settings['listen']['head']} is gone: the connection ended"
        in said
    )


def test_head_waits_for_the_engines_that_it_needs(new_cluster: NewCluster, prompts, tmp_path):
    worker = new_cluster("waits").add_worker("mixed", "head-0", start=False)
    port = free_port()
    worker.settings["listen"] |= {"http": port, "head": free_port(), "headless": 1}
    worker.start()

    def is_waiting() -> bool:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/ready")
        except httpx.TransportError:
            return False
        return "1 of 1 headless engines have not joined yet" in answer.text

    wait_for(is_waiting, END_SECONDS, worker.log_tail)
    with Headless(tmp_path, worker):
        worker.wait_ready()
        assert serving(worker) == {"0": 1, "1": 1}
        assert len(worker.client.complete(prompts(10), max_tokens=3).tokens) == 3
