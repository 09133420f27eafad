"""A server with OpenAI's API as a target of load: streamed completions and chat completions.

`ignore_eos` is an extension that vLLM, SGLang and PDCluster share.
"""

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdcluster_api.errors import IncompleteAnswerError, StartError, no_answer
from pdctl.bench.load import BenchRequest, OnChunk, TokenUsage

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@asynccontextmanager
async def http_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Without connection limits: the load generator has its own.  Sends OPENAI_API_KEY if set."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers
    ) as session:
        yield session


async def first_model(
    session: aiohttp.ClientSession,
    base_url: str,
    check: Callable[[aiohttp.ClientResponse], Awaitable[None]],
    option: str,
) -> str:
    """The first that the server lists.

    check:  raises an error for an answer that is none
    option: that gives the URL
    Raises StartError where none is listed.
    """
    url = f"{base_url}/v1/models"
    async with session.get(url) as response:
        await check(response)
        try:
            return str(json.loads(await response.read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as e:
            message = f"{url}: names no model; give --model, or correct {option}"
            raise StartError(message, exit_code=1) from e


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """base_url: without the endpoint, such as `http://127.0.0.1:8000`."""

    session: aiohttp.ClientSession
    base_url: str
    model: str
    endpoint: str = COMPLETIONS

    async def send(self, request: BenchRequest, on_chunk: OnChunk) -> TokenUsage:
        try:
            return await self._stream(self.body(request), on_chunk)
        except aiohttp.ClientError as e:
            raise IncompleteAnswerError(f"connection failed: {no_answer(e)}") from e

    def body(self, request: BenchRequest) -> dict[str, Any]:
        text = (
            {"messages": [{"role": "user", "content": request.prompt}]}
            if self.endpoint == CHAT
            else {"prompt": request.prompt}
        )
        body = {
            "model": self.model,
            **text,
            "max_tokens": request.num_output_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        if request.seed is not None:
            body["seed"] = request.seed
        return body

    async def _stream(self, body: dict[str, Any], on_chunk: OnChunk) -> TokenUsage:
        counted, is_done = None, False
        async with self.session.post(self.base_url + self.endpoint, json=body) as response:
            if response.status != 200:
                start = (await response.read())[:200]
                raise IncompleteAnswerError(f"HTTP {response.status}: {start!r}")
            async for data in server_sent_events(response.content):
                if data == b"[DONE]":
                    is_done = True
                    continue
                try:
                    event = completion_event(data)
                    if any(_shows_output(choice) for choice in event["choices"]):
                        on_chunk()
                    if usage := event.get("usage"):
                        counted = TokenUsage(
                            usage["completion_tokens"], usage.get("prompt_tokens", 0)
                        )
                except (LookupError, TypeError, AttributeError) as e:
                    raise IncompleteAnswerError(
                        f"an event is not of this API ({e!r}): {data[:100]!r}"
                    ) from e
        if not is_done or counted is None:
            raise IncompleteAnswerError("the stream ended without [DONE] and usage")
        return counted


def completion_event(data: bytes) -> dict[str, Any]:
    """Raises IncompleteAnswerError for an error event, or one of another API."""
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError as e:
        raise IncompleteAnswerError(f"an event is no JSON: {data[:100]!r}") from e
    if event.get("error"):
        raise IncompleteAnswerError(f"error event: {event['error']}")
    if "choices" not in event:
        raise IncompleteAnswerError(f"an event without choices: {data[:100]!r}")
    return event


def _shows_output(choice: dict[str, Any]) -> bool:
    """The first chunk of a chat has only the role."""
    if "delta" not in choice:
        return True
    delta = choice["delta"]
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))


async def server_sent_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Data of each server-sent event, however the bytes were split."""
    rest = b""
    async for piece in content.iter_any():
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                yield event.removeprefix(b"data:").strip()
