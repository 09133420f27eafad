"""The load generator: sends a workload to one system and records what a client sees.

Our own and not guidellm or vLLM's: those speak HTTP only, `generate()` does
not, and all systems of a run should be timed by the same code with the same
formulas (`stats`).  Every answer is checked: 200, `[DONE]`, the expected number
of tokens; a failure is recorded with its reason.  Time and count are bounded.
It talks to loopback addresses only.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import httpx
from stats import Answer, Run
from workload import Workload

REQUEST_LIMIT_SECONDS = 180.0

OnChunk = Callable[[], None]


class IncompleteAnswerError(Exception):
    """The system answered with an error, or ended before its answer did."""


class Target(Protocol):
    """Anything that answers a prompt."""

    async def generate(self, prompt: list[int], num_output_tokens: int, on_chunk: OnChunk) -> int:
        """Answer greedily; call on_chunk as each chunk arrives; return how many tokens the system says it made.

        Raises IncompleteAnswerError.
        """
        ...


async def run_workload(target: Target, workload: Workload, seed: str, vocab_size: int) -> Run:
    """Send the whole workload and wait for every answer."""
    prompts = workload.prompts(seed, vocab_size)
    cpu_seconds, start = time.process_time(), time.monotonic()
    loop = _closed_loop(target, workload, prompts) if workload.concurrency else _open_loop(target, workload, prompts, start, seed)
    answers = await loop
    return Run(tuple(answers), time.monotonic() - start, time.process_time() - cpu_seconds)


async def _closed_loop(target: Target, workload: Workload, prompts: list[list[int]]) -> list[Answer]:
    """Each of the clients sends its next request when its last one ended: a request is due when its client is free."""
    waiting = iter(prompts)

    async def client() -> list[Answer]:
        return [await _ask(target, prompt, workload.num_output_tokens, time.monotonic()) for prompt in waiting]

    return [answer for answers in await asyncio.gather(*(client() for _ in range(workload.concurrency or 1))) for answer in answers]


async def _open_loop(target: Target, workload: Workload, prompts: list[list[int]], start: float, seed: str) -> list[Answer]:
    """Requests leave on schedule, whatever became of those before."""

    async def client(prompt: list[int], scheduled: float) -> Answer:
        await asyncio.sleep(scheduled - time.monotonic())
        return await _ask(target, prompt, workload.num_output_tokens, scheduled)

    schedule = zip(prompts, workload.arrivals(seed), strict=True)
    return await asyncio.gather(*(client(prompt, start + arrival) for prompt, arrival in schedule))


async def _ask(target: Target, prompt: list[int], num_output_tokens: int, scheduled: float) -> Answer:
    chunk_seconds: list[float] = []
    started = time.monotonic()
    num_tokens, failure = 0, None
    try:
        async with asyncio.timeout(REQUEST_LIMIT_SECONDS):
            num_tokens = await target.generate(prompt, num_output_tokens, lambda: chunk_seconds.append(time.monotonic()))
    except TimeoutError:
        failure = f"no complete answer in {REQUEST_LIMIT_SECONDS:g} s"
    except IncompleteAnswerError as e:
        failure = str(e)
    if failure is None and (num_tokens != num_output_tokens or not chunk_seconds):
        failure = f"{num_tokens} tokens in {len(chunk_seconds)} chunks, expected {num_output_tokens} tokens"
    return Answer(scheduled, started, tuple(chunk_seconds), num_tokens, failure)


async def stream_completion(http: httpx.AsyncClient, body: dict[str, Any], on_chunk: OnChunk) -> int:
    """POST a streamed completion to `{base_url}/completions`; returns usage's completion_tokens.

    Raises IncompleteAnswerError for another status, an error event, or a stream without [DONE] or usage.
    """
    try:
        return await _stream(http, {**body, "stream": True, "stream_options": {"include_usage": True}}, on_chunk)
    except httpx.HTTPError as e:
        raise IncompleteAnswerError(f"connection failed: {e!r}") from e


async def _stream(http: httpx.AsyncClient, body: dict[str, Any], on_chunk: OnChunk) -> int:
    num_tokens, is_done = None, False
    async with http.stream("POST", "completions", json=body) as response:
        if response.status_code != 200:
            raise IncompleteAnswerError(f"HTTP {response.status_code}: {(await response.aread())[:200]!r}")
        async for data in _events(response.aiter_raw()):
            if data == b"[DONE]":
                is_done = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise IncompleteAnswerError(f"error event: {event['error']}")
            if event["choices"]:
                on_chunk()
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    if not is_done or num_tokens is None:
        raise IncompleteAnswerError("the stream ended without [DONE] and usage")
    return int(num_tokens)


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event, however the bytes were cut on their way."""
    rest = b""
    async for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            yield event.removeprefix(b"data: ")
