"""The measurements of `pdctl bench`, of a running server or of a cluster started for one."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pdcluster_api.errors import StartError
from pdctl.bench.load import REQUEST_LIMIT_SECONDS, Arrivals, BenchRequest, LoadTarget, run_load
from pdctl.bench.openai import COMPLETIONS, OpenAIServer, http_session
from pdctl.bench.request_results import LoadResult
from pdctl.bench.started import started_cluster


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


BatchPrompts = Callable[[int], Sequence[BenchRequest]]
"""Requests of an iteration by its number: other prompts in each, so that no prefix cache
answers.
"""


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[OpenAIServer]:
    """Raises StartError when the server does not answer."""
    async with http_session() as session:
        base_url = server.base_url.rstrip("/").removesuffix("/v1")
        model = server.model or await _first_model(session, base_url)
        yield OpenAIServer(session, base_url, model, server.endpoint)


@asynccontextmanager
async def started(local: LocalCluster) -> AsyncIterator[OpenAIServer]:
    async with started_cluster(local.file, local.model) as cluster, http_session() as session:
        yield OpenAIServer(session, cluster.base_url, cluster.model)


async def _first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    url = f"{base_url}/v1/models"
    try:
        async with session.get(url) as response:
            if response.status != 200:
                fix = "give the model with --model, or correct --base-url"
                raise StartError(f"{url}: HTTP {response.status}; {fix}", exit_code=1)
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError) as e:
        fix = "start the server, or correct --base-url"
        raise StartError(f"{url}: cannot be read: {e}; {fix}", exit_code=1) from e
    except (ValueError, LookupError, TypeError) as e:
        fix = "give the model with --model"
        raise StartError(f"{url}: names no model; {fix}", exit_code=1) from e


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
    target: LoadTarget, batch: BatchPrompts, num_warmup: int, num_iters: int, schedule: Arrivals
) -> list[float]:
    """Seconds of each iteration: a batch sent at once, until its last answer.

    Raises StartError when an answer fails.
    """
    seconds = []
    for number in range(num_warmup + num_iters):
        run = require_complete(await run_load(target, batch(number), schedule))
        if number >= num_warmup:
            seconds.append(run.duration_seconds)
    return seconds


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
