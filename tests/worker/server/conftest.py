"""A scripted backend and a byte-level tokenizer behind the real application, on a real uvicorn and
a real socket.

Only the backend is a double: it is the wall to `dispatch`.  Its tokens follow a
fixed script, so every expected text can be written down.
"""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
from starlette.applications import Starlette
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import AdmissionSpec
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.adapters import AdapterReply
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.messages.overview import (
    ClusterOverview,
    ConditionsOverview,
    History,
    KvTier,
    WorkerFigures,
    WorkerOverview,
)
from pdcluster_worker.messages.peers import Generated, PrefillMode, PrefillPlace
from pdcluster_worker.messages.requests import PromptLogprob, RequestSpec, Token
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.decode_choice import NO_HINTS, RouteHints
from pdcluster_worker.server.app import create_app
from pdcluster_worker.server.http.api_keys import ApiKeys
from pdcluster_worker.server.http.open_answers import OpenAnswers
from pdcluster_worker.server.http.run import HttpServer, serve
from pdcluster_worker.server.text.tokenizer import Tokenizer
from pdcluster_worker.streams import Reader

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def build_model_folder(folder: Path) -> Path:
    """A folder with a tokenizer of 256 bytes, one merge and two control tokens; <|im_end|> (258)
    ends a generation.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)} | {"He": 256}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("H", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


DEVICE = DeviceFacts("cpu", "Xeon", "", "reference", "decoder")


@dataclass
class ScriptedBackend:
    """Makes the tokens of `script(spec)` for every choice, in turn, and records what was asked of
    it.

    error, error_after:  raised after so many tokens in all.
    hold_after:          waits for `gate` after so many tokens in all; `holding` is set then.
    num_taken:           by readers, past the stream.
    """

    script: Callable[[RequestSpec], list[int]]
    model_name: str = "tiny"
    adapters: dict[str, str] = field(default_factory=dict)
    adapters_called: list[tuple[str, ...]] = field(default_factory=list)
    adapter_error: Exception | None = None
    max_model_len: int = 200
    vocab_size: int = 259
    length_note: str = ""
    device: DeviceFacts | None = DEVICE
    scheduler: str | None = "sarathi"
    place: PrefillPlace = "local"
    degraded: tuple[str, ...] = ()
    error: Exception | None = None
    error_after: int = 0
    hold_after: int | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[tuple[list[RequestSpec], PrefillMode]] = field(default_factory=list)
    hints: list[RouteHints] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: list[str] = field(default_factory=list)
    readers: dict[str, Reader[Generated]] = field(default_factory=dict)
    num_taken: int = 0
    not_ready: str | None = None
    dead: str | None = None
    short: str | None = None
    drains: bool = False
    ingresses: int = 1
    num_overviews: int = 0
    conditions: ConditionsOverview | None = None
    tiers: list[KvTier] = field(default_factory=list)  # of the decode worker
    states: dict[str, str] = field(default_factory=dict)  # by role; else ready
    gone: set[str] = field(default_factory=set)  # roles without a worker
    roles: dict[str, str] = field(default_factory=dict)  # other names of roles
    history: dict[str, list[int]] = field(
        default_factory=lambda: {"decode": [1, 1], "prefill": [0, 1]}
    )  # ready workers by role

    def adapter_calls(self) -> "ScriptedBackend":
        return self

    async def load(self, name: str, path: str) -> AdapterReply:
        self._note("load", name, path)
        return AdapterReply(0, f"weights of {path}", 100, 200)

    async def unload(self, name: str) -> AdapterReply:
        self._note("unload", name)
        return AdapterReply(0, free_bytes=300)

    def _note(self, *call: str) -> None:
        self.adapters_called.append(call)
        if self.adapter_error is not None:
            raise self.adapter_error

    def overview(self) -> ClusterOverview:
        """A prefill and a decode worker; the KV of a request has moved since the last one."""
        if self.not_ready:
            raise RequestError(self.not_ready, status=503, code="not_ready")
        self.num_overviews += 1
        moved = 1000 * self.num_overviews
        figures = WorkerFigures(2, 1, 25, 100, 1, moved, self.num_overviews, 1)
        below = replace(figures, tiers=self.tiers)
        workers = [
            WorkerOverview(
                *(f"c-{role}-0", self.roles.get(role, role), "cpu"),
                *(self.states.get(role, "ready"), "", "Xeon", found),
            )
            for role, found in (("decode", below), ("prefill", figures))
            if role not in self.gone
        ]
        history = History(30, self.history, [0, 3], [2, 1])
        return ClusterOverview(
            *("ns", "c", "r1", self.model_name, "c-decode-0", "decode", self.short),
            workers,
            history,
            self.conditions,
        )

    def ready(self) -> str | None:
        return self.not_ready

    def alive(self) -> str | None:
        return self.dead

    def shortfall(self) -> str | None:
        return self.short

    def draining(self) -> bool:
        return self.drains

    def num_ingresses(self) -> int:
        return self.ingresses

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def generate(
        self,
        specs: list[RequestSpec],
        prefill: PrefillMode,
        hints: RouteHints = NO_HINTS,
        reader: Reader[Generated] | None = None,
    ) -> AsyncGenerator[Generated, None]:
        if reader is not None:
            self.readers[specs[0].request_id] = reader
        self.calls.append((specs, prefill))
        self.hints.append(hints)
        scripts = [self._tokens(spec) for spec in specs]
        ended = False
        made = 0
        try:
            for step in range(max(len(tokens) for tokens in scripts)):
                for index, tokens in enumerate(scripts):
                    if step >= len(tokens) or specs[index].request_id in self.aborted:
                        continue
                    if self.error is not None and made >= self.error_after:
                        raise self.error
                    if made == self.hold_after:
                        self.holding.set()
                        await self.gate.wait()
                    await asyncio.sleep(0)
                    made += 1
                    first = step == 0
                    generated = Generated(
                        tokens[step],
                        self.place if first else None,
                        index,
                        self.degraded if first else (),
                    )
                    reader = self.readers.get(specs[index].request_id)
                    if reader is not None and reader.is_open and step + 1 < len(tokens):
                        self.num_taken += 1
                        reader.take(generated)
                    else:
                        yield generated
            ended = True
        finally:
            if not ended:
                self.cancelled.set()

    def _tokens(self, spec: RequestSpec) -> list[Token]:
        ids = self.script(spec)[: spec.sampling.max_tokens]
        tokens = [self._token(spec, token_id) for token_id in ids]
        last = tokens[-1]
        is_stop = last.token_id in {*spec.sampling.eos_token_ids, *spec.sampling.stop_token_ids}
        reason = "stop" if is_stop else "length"
        tokens[-1] = Token(
            spec.request_id,
            last.token_id,
            last.logprob,
            last.top_logprobs,
            reason,
            None,
            last.cached_tokens,
        )
        prompt = _prompt_logprobs(spec)
        first = tokens[0]
        tokens[0] = Token(
            spec.request_id,
            ids[0],
            first.logprob,
            first.top_logprobs,
            first.finish_reason,
            None,
            16,
            0.01,
            0.02,
            prompt,
        )
        return tokens

    def _token(self, spec: RequestSpec, token_id: int) -> Token:
        count = spec.sampling.logprobs
        if count is None:
            return Token(spec.request_id, token_id)
        return Token(
            spec.request_id,
            token_id,
            -0.5,
            [(token_id, -0.5), *((other, float("-inf")) for other in range(count - 1))][:count],
        )


def _prompt_logprobs(spec: RequestSpec) -> list[PromptLogprob]:
    """At position p -p, with token 65 (b) before it; none where they are not asked for."""
    count = spec.sampling.prompt_logprobs
    if count is None:
        return []
    return [
        PromptLogprob(-float(at), 2, [(65, -0.25), (66, -1.5)][:count])
        for at in range(1, len(spec.prompt))
    ]


def asgi_client(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@dataclass
class Rig:
    """One application and what stands around it."""

    backend: ScriptedBackend
    tokenizer: Tokenizer
    metrics: Metrics
    policy: PolicyConfig
    open_answers: OpenAnswers = field(default_factory=OpenAnswers)
    app: Starlette = field(init=False)

    def __post_init__(self) -> None:
        self.app = self.make_app()

    def make_app(self, **options: Any) -> Starlette:
        """The application over this backend, with other options of `create_app`."""
        return create_app(
            *(self.backend, self.tokenizer, self.metrics, lambda: self.policy),
            **{"open_answers": self.open_answers, **options},
        )

    def client(self, **options: Any) -> httpx.AsyncClient:
        """A client that calls such an application without a socket."""
        return asgi_client(self.make_app(**options))

    def keyed(self, folder: Path, *names: str, **options: Any) -> httpx.AsyncClient:
        """The same with the API key sk-NAME for each name."""
        for name in names:
            (folder / name).write_text(f"sk-{name}")
        return self.client(tenant_of=ApiKeys(folder).tenant_of, **options)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's client of such an application without a socket."""
        self.app = self.make_app(**options)
        return openai.AsyncOpenAI(
            base_url="http://test/v1",
            api_key="none",
            max_retries=0,
            http_client=asgi_client(self.app),
        )

    def say(self, text: str, *, end: bool = True) -> None:
        """Let every choice answer `text`, then <|im_end|> unless `end` is False."""
        ids = [self.tokenizer._tokenizer.encode(character).ids for character in text]
        self.backend.script = lambda spec: (
            [i for group in ids for i in group] + ([258] if end else [])
        )

    @property
    def spec(self) -> RequestSpec:
        """The first choice of the last prompt that was asked for."""
        return self.backend.calls[-1][0][0]

    def prompt(self) -> str:
        """The text of that prompt."""
        return self.tokenizer._tokenizer.decode(self.spec.prompt, skip_special_tokens=False)

    def value(self, name: str, **labels: str) -> float:
        """A sample of the metrics, 0 when it is not there yet."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rig(model_folder: Path) -> Rig:
    return make_rig(model_folder)


def make_rig(model_folder: Path) -> Rig:
    """An application that says hello."""
    tokenizer = Tokenizer.load(model_folder)
    metrics = Metrics()
    policy = PolicyConfig(admission=AdmissionSpec(max_body_bytes=20_000))
    backend = ScriptedBackend(lambda spec: [258])
    rig = Rig(backend, tokenizer, metrics, policy)
    rig.say("Hello, world!")
    return rig


@pytest.fixture
async def server(rig: Rig) -> AsyncIterator[HttpServer]:
    """The application on a real socket."""
    server = await serve(rig.app, "127.0.0.1", 0, open_answers=rig.open_answers)
    yield server
    rig.backend.gate.set()
    await server.close()


@pytest.fixture
def url(server: HttpServer) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture
async def http(rig: Rig) -> AsyncIterator[httpx.AsyncClient]:
    """A client that calls the application without a socket."""
    async with asgi_client(rig.app) as client:
        yield client


@pytest.fixture
async def wire(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client over the socket."""
    async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
        yield client


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.AsyncClient(trust_env=False, timeout=20)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport
    ) as client:
        yield client


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Wait for a condition, polling; the caller's asyncio.timeout is the deadline."""

    async def wait(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture
async def deaf(
    server: HttpServer,
) -> AsyncIterator[Callable[[dict[str, object]], Awaitable[socket.socket]]]:
    """Asks for a chat answer on a socket with small buffers, of which it reads
    nothing by itself.
    """
    opened = []

    async def ask(body: dict[str, object]) -> socket.socket:
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        opened.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", server.port))
        content = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: "
            f"application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        await loop.sock_sendall(sock, head.encode() + content)
        return sock

    yield ask
    for sock in opened:
        sock.close()
