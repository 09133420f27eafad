"""The measurements of `pdctl bench`, of a running server or of a cluster started for one."""

import asyncio
import json
import re
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from pdcluster_api.errors import StartError, no_answer
from pdctl.bench.load import (
    REQUEST_LIMIT_SECONDS,
    Arrivals,
    BenchRequest,
    LoadResult,
    LoadTarget,
    run_load,
)
from pdctl.bench.openai import COMPLETIONS, OpenAIServer, first_model, http_session

START_LIMIT_SECONDS = 600.0
"""Two stock engines that start on two cores, and compile meanwhile, take over three minutes.  One
that ends says so at once.
"""

STOP_LIMIT_SECONDS = 30.0

_READY = re.compile(r"^ready: (http://[^/\s]+)")


@dataclass(frozen=True, slots=True)
class StartedCluster:
    """A cluster that serves.

    base_url:      of its ingress, without a path
    start_seconds: from the command to ready
    state:         the state file of the run, at that time
    """

    base_url: str
    start_seconds: float
    state: dict[str, Any]

    @property
    def model(self) -> str:
        return str(self.state["model"])


@asynccontextmanager
async def started_cluster(
    file: Path, model: Path, engine: Mapping[str, Any] | None = None
) -> AsyncIterator[StartedCluster]:
    """`pdctl up FILE` on a free port, with state and logs in a temporary folder.

    engine: fields that replace those of `spec.engine`
    Raises StartError with its output when it does not start.
    """
    with tempfile.TemporaryDirectory(
        prefix="pdcluster-bench-", ignore_cleanup_errors=True
    ) as folder:
        changed = Path(folder) / file.name
        changed.write_text(with_engine(file.read_text(), engine or {}))
        start = time.monotonic()
        options = (
            "--no-progress",
            "--port",
            "0",
            "--state-dir",
            folder,
            "--model-path",
            str(model),
        )
        command = (sys.executable, "-m", "pdctl", "up", str(changed), *options)
        # In its own session: Ctrl-C reaches it through us only, once.
        process = await asyncio.create_subprocess_exec(
            *command, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
        try:
            base_url = await _ready_url(process, file)
            start_seconds = time.monotonic() - start
            state = json.loads(next(Path(folder).glob("*/*/state.json")).read_text())
            yield StartedCluster(base_url, start_seconds, state)
        finally:
            await end_process(process)


def with_engine(text: str, engine: Mapping[str, Any]) -> str:
    """Override fields of `spec.engine` in a file of YAML; other objects are kept.

    >>> with_engine("kind: PDCluster\\nspec: {engine: {threads: 2}}", {"maxSequences": 8})
    'kind: PDCluster\\nspec:\\n  engine:\\n    threads: 2\\n    maxSequences: 8\\n'
    """
    documents = list(yaml.safe_load_all(text))
    for body in documents:
        if isinstance(body, dict) and body.get("kind") == "PDCluster":
            body["spec"]["engine"] = {**body["spec"].get("engine", {}), **engine}
    return yaml.safe_dump_all(documents, sort_keys=False)


async def end_process(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.communicate(), STOP_LIMIT_SECONDS)
    except TimeoutError:
        process.kill()  # pdctl's children die with it
        await process.wait()


async def _ready_url(process: Process, file: Path) -> str:
    assert process.stdout is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(START_LIMIT_SECONDS):
            async for line in process.stdout:
                lines.append(line.decode())
                if ready := _READY.match(lines[-1]):
                    return ready[1]
    except TimeoutError:
        lines.append(f"not ready in {START_LIMIT_SECONDS:g} s")
    raise StartError(f"pdctl up {file} did not start:\n{''.join(lines)}", exit_code=1)


@dataclass(frozen=True, slots=True)
class Server:
    """model: None = the first that the server lists."""

    base_url: str
    model: str | None = None
    endpoint: str = COMPLETIONS


@dataclass(frozen=True, slots=True)
class LocalCluster:
    file: Path
    model: Path


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[OpenAIServer]:
    """Raises StartError when the server does not answer."""
    async with http_session() as session:
        base_url = server.base_url.rstrip("/").removesuffix("/v1")
        model = server.model
        try:
            model = model or await first_model(session, base_url, _check_listed, "--base-url")
        except (aiohttp.ClientError, OSError) as e:
            reason = f"{base_url}/v1/models: does not answer: {no_answer(e)}; start the server, or "
            raise StartError(f"{reason}correct --base-url", exit_code=1) from e
        yield OpenAIServer(session, base_url, model, server.endpoint)


@asynccontextmanager
async def started(local: LocalCluster) -> AsyncIterator[OpenAIServer]:
    async with started_cluster(local.file, local.model) as cluster, http_session() as session:
        yield OpenAIServer(session, cluster.base_url, cluster.model)


async def _check_listed(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        fix = "give the model with --model, or correct --base-url"
        raise StartError(f"{response.url}: HTTP {response.status}; {fix}", exit_code=1)


async def warm_up(
    target: LoadTarget,
    requests: Sequence[BenchRequest],
    limit_seconds: float = REQUEST_LIMIT_SECONDS,
) -> None:
    """Send one request after the other.  Raises StartError for the first failure."""
    run = await run_load(target, requests, Arrivals(max_concurrency=1, limit_seconds=limit_seconds))
    if run.failures:
        raise StartError(f"the first request failed: {run.failures[0]}", exit_code=1)


async def batch_latencies(
    target: LoadTarget, batches: Iterable[Sequence[BenchRequest]], schedule: Arrivals
) -> AsyncIterator[float]:
    """Seconds of each batch: sent at once, until its last answer.

    Raises StartError when an answer fails.
    """
    for batch in batches:
        yield require_complete(await run_load(target, batch, schedule)).duration_seconds


def require_complete(run: LoadResult) -> LoadResult:
    """Raises StartError when an answer failed."""
    if run.failures:
        count = f"{len(run.failures)} of {len(run.results)} requests failed"
        raise StartError(f"{count}, the first: {run.failures[0]}", exit_code=1)
    return run


def vocab_size(model: Path) -> int:
    """Raises StartError where the model's config has none."""
    path = model / "config.json"
    try:
        return int(json.loads(path.read_text())["vocab_size"])
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise StartError(
            f"{path}: has no vocab_size; give the folder of a model", exit_code=2
        ) from e
