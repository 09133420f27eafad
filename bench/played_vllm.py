"""A server in place of vLLM: its HTTP without its compute, to time what stands before it.

    bench/played_vllm.py serve MODEL --port 8000 --served-model-name NAME [further options of vLLM]

Each request has its first token after `FIRST_SECONDS` and one every `STEP_SECONDS` then, by the
token API and by /v1/completions alike.
"""

import argparse
import asyncio
import json
from typing import Any, cast

import httptools
import uvloop

FIRST_SECONDS = 0.02
STEP_SECONDS = 0.005
VERSION = "0.32.0"
TOKEN_ID = 1234
NUMBERS = """\
process_start_time_seconds 1.79542970805e+09
vllm:num_requests_running{engine="0"} 0.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="4096"} 1.0
"""


class Connection(asyncio.Protocol):
    """model: as clients name it"""

    def __init__(self, model: str) -> None:
        card = {"id": model, "max_model_len": 4096}
        self._pages = {
            b"/health": b"",
            b"/version": json.dumps({"version": VERSION}).encode(),
            b"/v1/models": json.dumps({"data": [card]}).encode(),
            b"/metrics": NUMBERS.encode(),
        }
        self._stream: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        self._parser.feed_data(data)

    def connection_lost(self, _: Exception | None) -> None:
        """asyncio's."""
        if self._stream is not None:
            self._stream.cancel()

    def on_message_begin(self) -> None:
        """httptools'."""
        self._path, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        """httptools'."""
        self._path += url

    def on_body(self, body: bytes) -> None:
        """httptools'."""
        self._body += body

    def on_message_complete(self) -> None:
        """httptools'."""
        if self._parser.get_method() == b"GET":
            self._answer(self._pages.get(self._path))
            return
        body = json.loads(self._body)
        is_of_tokens = self._path == b"/inference/v1/generate"
        params = body["sampling_params"] if is_of_tokens else body
        if not body.get("stream"):
            self._answer(json.dumps({"choices": [made(is_of_tokens, "length")]}).encode())
            return
        events = made_events(params["max_tokens"], is_of_tokens=is_of_tokens)
        self._stream = asyncio.create_task(self._send(events))

    def _answer(self, body: bytes | None) -> None:
        head = f"HTTP/1.1 {404 if body is None else 200} X\r\ncontent-length: {len(body or b'')}"
        self._transport.write(f"{head}\r\n\r\n".encode() + (body or b""))

    async def _send(self, events: list[bytes]) -> None:
        start = asyncio.get_running_loop().time() + FIRST_SECONDS
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        self._transport.write(head + b"transfer-encoding: chunked\r\n\r\n")
        for number, event in enumerate(events):
            left = start + number * STEP_SECONDS - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, left))
            self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
        self._transport.write(b"0\r\n\r\n")


def made(is_of_tokens: bool, reason: str | None) -> dict[str, Any]:
    """A choice with one token."""
    token = {"token_ids": [TOKEN_ID]} if is_of_tokens else {"text": " sea"}
    return {"index": 0, **token, "finish_reason": reason}


def made_events(num_tokens: int, *, is_of_tokens: bool) -> list[bytes]:
    """Parts of a stream, an event for each token; usage and end come with the last one."""
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens}
    bodies = [
        {"choices": [made(is_of_tokens, "length" if number == num_tokens - 1 else None)]}
        for number in range(num_tokens)
    ]
    *events, last = (b"data: " + json.dumps(each).encode() + b"\n\n" for each in bodies)
    end = json.dumps({"choices": [], "usage": usage}).encode()
    return [*events, last + b"data: " + end + b"\n\ndata: [DONE]\n\n"]


async def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    options, _ = parser.parse_known_args()
    loop = asyncio.get_running_loop()
    model = options.served_model_name
    server = await loop.create_server(lambda: Connection(model), "127.0.0.1", options.port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
