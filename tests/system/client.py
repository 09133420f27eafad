"""A plain HTTP client of one worker: whole answers and streams, as token ids.

Streams are read as raw server-sent events, so a test sees what is really on the
wire: whether `[DONE]` came, and an error event in its place.
"""

import http.client
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.system.tokens import tokens_in

MODEL = "tiny"
TIMEOUT_SECONDS = 60.0

Json = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """One choice.  logprobs: OpenAI's `token_logprobs`, empty unless asked for."""

    tokens: list[int]
    finish_reason: str
    logprobs: list[float]


@dataclass(frozen=True)
class Answer:
    """A whole answer.  prefill: the response header."""

    choices: list[Choice]
    prefill: str
    usage: Json

    @property
    def tokens(self) -> list[int]:
        return self.choices[0].tokens

    @property
    def cached_tokens(self) -> int:
        cached: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return cached


@dataclass
class Stream:
    """One stream while it is read; `text` by choice index."""

    prefill: str
    lines: Iterator[str]
    texts: dict[int, str] = field(default_factory=dict)
    finish_reason: str | None = None
    done: bool = False
    error: Json | None = None
    usage: Json | None = None

    def next(self) -> bool:
        """Read one event; False at the end of the stream."""
        data = next((line[6:] for line in self.lines if line.startswith("data: ")), None)
        if data is not None:
            self.take(data)
        return data is not None

    def take(self, data: str) -> None:
        """Take the data of one event."""
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        self.error = event.get("error", self.error)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", []):
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    @property
    def tokens(self) -> list[int]:
        """Tokens of the first choice, so far."""
        return tokens_in(self.texts.get(0, ""))

    def read_tokens(self, count: int) -> list[int]:
        """Read until that many tokens are here."""
        while len(self.tokens) < count:
            assert self.next(), f"the stream ended after {len(self.tokens)} tokens: {self.error}"
        return self.tokens

    def read_all(self) -> list[int]:
        while self.next():
            pass
        return self.tokens


def body(prompt: Iterable[int], prefill: str = "auto", **fields: Any) -> Json:
    """A completion request: greedy and never ended by an end-of-sequence token unless `fields` say
    otherwise.
    """
    defaults = {
        "model": MODEL,
        "prompt": list(prompt),
        "temperature": 0,
        "max_tokens": 8,
        "ignore_eos": True,
    }
    return {**defaults, "pdcluster": {"prefill": prefill}, **fields}


class Client:
    """Talks to one base URL."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.Client(
            base_url=url, timeout=TIMEOUT_SECONDS, limits=limits, trust_env=False
        )

    def close(self) -> None:
        self.http.close()

    def post(self, request: Json, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.http.post("/v1/completions", json=request, headers=headers)

    def complete(self, prompt: Iterable[int], prefill: str = "auto", **fields: Any) -> Answer:
        """A whole answer, which must be a success."""
        return answer_of(self.post(body(prompt, prefill, **fields)))

    @contextmanager
    def stream(
        self,
        prompt: Iterable[int],
        prefill: str = "auto",
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> Iterator[Stream]:
        """A stream, which must begin well; leaving the block early closes the connection."""
        request = body(prompt, prefill, **fields, stream=True)
        with self.http.stream("POST", "/v1/completions", json=request, headers=headers) as reply:
            if reply.status_code != httpx.codes.OK:
                raise AssertionError(f"{reply.status_code}: {reply.read().decode()}")
            yield Stream(reply.headers["x-pdcluster-prefill"], reply.iter_lines())

    @contextmanager
    def unread(self, prompt: Iterable[int], prefill: str = "auto", **fields: Any) -> Iterator[None]:
        """A stream whose answer, headers too, is never read; the connection breaks when the block
        is left.
        """
        url = self.http.base_url
        with closing(http.client.HTTPConnection(url.host, url.port)) as connection:
            request = json.dumps(body(prompt, prefill, **fields, stream=True))
            connection.request(
                "POST", "/v1/completions", request, {"content-type": "application/json"}
            )
            yield

    @contextmanager
    def slow(
        self, prompt: Iterable[int], prefill: str = "auto", **fields: Any
    ) -> Iterator[Callable[[], str]]:
        """A whole answer that goes no further than the worker's kernel until what is yielded reads
        it: its text.
        """
        url = self.http.base_url
        with closing(http.client.HTTPConnection(url.host, url.port)) as connection:
            connection.sock = socket.socket()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.sock.settimeout(TIMEOUT_SECONDS)
            connection.sock.connect((url.host, url.port))
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps(body(prompt, prefill, **fields)),
                {"content-type": "application/json"},
            )
            yield lambda: connection.getresponse().read().decode()


def answer_of(reply: httpx.Response) -> Answer:
    assert reply.status_code == httpx.codes.OK, f"{reply.status_code}: {reply.text}"
    content = reply.json()
    choices = [
        Choice(
            tokens_in(c["text"]),
            c["finish_reason"],
            (c["logprobs"] or {}).get("token_logprobs", []),
        )
        for c in content["choices"]
    ]
    return Answer(choices, reply.headers["x-pdcluster-prefill"], content["usage"])
