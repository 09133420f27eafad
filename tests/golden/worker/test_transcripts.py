"""Answers of a decode worker to the requests of `requests.yaml`, as they are on the wire."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from tests.golden import records
from tests.golden.worker.rig import Scene, Served, serving
from tests.golden.worker.transcripts import exchange, request_bytes, steady

HERE = Path(__file__).parent
RECORDS = HERE / "records" / "transcripts"
FILE = yaml.safe_load((HERE / "requests.yaml").read_text())
REQUESTS: dict[str, dict[str, Any]] = FILE["requests"]
STREAMS = {False: "whole", True: "stream", None: "once"}
CASES = {
    f"{name}.{STREAMS[stream]}": (request, stream)
    for name, request in REQUESTS.items()
    for stream in ([None] if request.get("once") else [False, True])
}
SETTINGS = {field.name for field in fields(Scene)}
DEADLINE_SECONDS = 20

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Workers:
    """Workers by scene, each started once: their ends take longest, and come together."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._ends: list[AsyncExitStack] = []
        self._running: dict[str, Served] = {}

    async def of(self, scene: Scene) -> Served:
        if (name := repr(scene)) not in self._running:
            folder = self._folder / str(len(self._ends))
            folder.mkdir()
            self._ends.append(AsyncExitStack())
            worker = serving(scene, self._model, folder)
            self._running[name] = await self._ends[-1].enter_async_context(worker)
        return self._running[name]

    async def close(self) -> None:
        await asyncio.gather(*(end.aclose() for end in self._ends))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    workers = Workers(model, tmp_path_factory.mktemp("workers"))
    yield workers
    await workers.close()


def scene_of(request: dict[str, Any]) -> Scene:
    settings = FILE["scenes"].get(request.get("scene"), {})
    return Scene(**settings | {name: request[name] for name in SETTINGS & request.keys()})


@pytest.mark.parametrize("name", CASES)
async def test_transcript(name: str, workers: Workers) -> None:
    request, stream = CASES[name]
    scene = scene_of(request)
    worker = await workers.of(scene)
    async with asyncio.timeout(DEADLINE_SECONDS), hanging(request, scene.waiting, worker):
        answers = await conversation(worker.port, request, stream)
    records.check(RECORDS / f"{name}.txt", steady("\n".join(answers)))


@asynccontextmanager
async def hanging(request: dict[str, Any], count: int, worker: Served) -> AsyncIterator[None]:
    """So many other requests of the same client, which have reached the engine."""
    sent = request_bytes({"headers": request.get("headers", {})}, stream=None)
    tasks, known = list[asyncio.Task[str]](), len(worker.engine.inputs)
    for number in range(count):
        tasks.append(asyncio.create_task(exchange(worker.port, sent)))
        while len(worker.engine.inputs) <= known + number:
            await asyncio.sleep(0.001)
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    while len(worker.engine.inputs) < known + 2 * count:  # each is aborted
        await asyncio.sleep(0.001)


async def conversation(port: int, request: dict[str, Any], stream: bool | None) -> list[str]:
    """Answers to a request and to those after it, which may name the first one's id."""
    answers: list[str] = []
    for step in [request, *request.get("then", [])]:
        sent = request_bytes(step, stream=stream)
        if answers and (first := re.search(r'"id":"([^"]+)"', answers[0])):
            sent = sent.replace(b"{id}", first[1].encode())
        answers.append(await exchange(port, sent))
    return answers


async def test_transcripts_have_a_request_each() -> None:
    records.check_names(RECORDS, [f"{name}.txt" for name in CASES])
