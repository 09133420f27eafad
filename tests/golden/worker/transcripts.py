"""Requests over a socket, and answers as text without what differs from run to run."""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "count_tokens": "/v1/messages/count_tokens",
}
_HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "tiny", "messages": _HI},
    "completions": {"model": "tiny", "prompt": "Hi"},
    "responses": {"model": "tiny", "input": "Hi"},
    "messages": {"model": "tiny", "max_tokens": 64, "messages": _HI},
    "count_tokens": {"model": "tiny", "messages": _HI},
}
_IDS = re.compile(r"[0-9a-f]{32,}|(?<=call_)\w{9,}|(?<=toolu_)\w{9,}|(?<=challenge=)[\w-]+")
_TIMES = re.compile(r'("(?:created|created_at|completed_at)":|seconds=)(?:"[\dTZ:-]+"|[\d.e-]+)')
_CHOICE = re.compile(r'"choices":\[\{"index":(\d+)')
_LENGTH = re.compile(r"^content-length: (\d+)$", re.MULTILINE)
_DATE = re.compile(r"^date: .*$", re.MULTILINE)


def request_bytes(request: Mapping[str, Any], *, stream: bool | None) -> bytes:
    """A request of `requests.yaml` as it is sent; `stream` is added to a body."""
    if "raw" in request:
        return str(request["raw"]).replace("\n", "\r\n").encode()
    api = request.get("api", "chat")
    method = request.get("method", "POST")
    path = request.get("path", PATHS[api])
    headers = {"host": "worker", "connection": "close"} | request.get("headers", {})
    if "padding" in request:
        headers["padding"] = "." * request["padding"]
    content = b""
    if method == "POST":
        body = request.get("body", {})
        if isinstance(body, dict):
            streams = {} if stream is None else {"stream": stream}
            content = json.dumps(BODIES.get(api, {}) | streams | body).encode()
        else:
            content = str(body).encode()
        headers = {"content-type": "application/json", "content-length": len(content)} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content


async def exchange(port: int, sent: bytes) -> str:
    """Send a request, and return head and whole body of its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    head = ""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().replace("\r\n", "\n")
        length = _LENGTH.search(head)
        # a refused body is waited for after its answer, a whole one has no more than its length
        body = await (reader.read() if length is None else reader.readexactly(int(length[1])))
    except asyncio.IncompleteReadError as e:  # closed before: HEAD's answer has no body
        body = e.partial
    finally:
        writer.close()
    if "transfer-encoding: chunked" in head:
        body = _joined(body)
    return f"{head}{body.decode()}\n"


def _joined(body: bytes) -> bytes:
    """The body of chunks, which ends with an empty one unless it was cut off."""
    joined, size = b"", -1
    while body and size:
        line, _, rest = body.partition(b"\r\n")
        size = int(line, 16)
        joined, body = joined + rest[:size], rest[size + 2 :]
    return joined if size == 0 else joined + b"<cut off>"


def steady(text: str) -> str:
    """Ids numbered as they come up, times as 0, a stream's choices one after the other."""
    ids: dict[str, str] = {}
    text = _IDS.sub(lambda found: ids.setdefault(found[0], f"<id {len(ids) + 1}>"), text)
    return _sorted(_DATE.sub("date: <now>", _TIMES.sub(r"\g<1>0", text)))


def _sorted(text: str) -> str:
    """Events of a choice in the places that events of choices have."""
    parts = text.split("\n\n")
    places = [place for place, part in enumerate(parts) if _CHOICE.search(part)]
    events = sorted((parts[place] for place in places), key=lambda part: _CHOICE.findall(part)[0])
    for place, event in zip(places, events, strict=True):
        parts[place] = event
    return "\n\n".join(parts)
