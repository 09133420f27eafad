"""A decode worker whose HTTP application, dispatch and peers' bookkeeping are real, behind a
scripted engine.  All that the records of transcripts import from inside stands here.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace
from tokenizers import Tokenizer as Encoder

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.config.policy import PolicyFile
from pdcluster_worker.errors import PeerError
from pdcluster_worker.messages.engine import (
    Abort,
    EngineInput,
    EngineOutput,
    PrefillDone,
    Receive,
    ReceiveDone,
    ReceiveFailed,
    ReceiveReady,
    RequestFailed,
    Submit,
    Tokens,
)
from pdcluster_worker.messages.peers import Generated, PrefillMode, WorkerLoad
from pdcluster_worker.messages.requests import PromptLogprob, RequestSpec, Token, TransferTarget
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.server.app import create_app, create_prefill_app
from pdcluster_worker.server.generation.chat_answer import ParserNames
from pdcluster_worker.server.http.api_keys import ApiKeys
from pdcluster_worker.server.http.limits import limits_of
from pdcluster_worker.server.http.run import serve
from pdcluster_worker.server.text.tokenizer import Tokenizer
from pdcluster_worker.serving.backend import WorkerBackend
from pdcluster_worker.serving.decode.broker import CreditBroker
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.decode.remote_prefill import RemotePrefill
from pdcluster_worker.serving.engines.client import EngineClient
from pdcluster_worker.serving.engines.engines import Engine, Engines
from pdcluster_worker.serving.engines.metrics import EngineMetrics
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.worker_context import WorkerContext
from tests.worker.serving.doubles import FACTS, RecordingPeer, ScriptedEngine
from tests.worker.serving.ingress.ingresses import busy_here

END = 258
EPOCH = b"e" * 16
TURNS = 50  # of the event loop between two steps of the engine: others have done all they can


@dataclass(frozen=True)
class Scene:
    """Settings of one request of `requests.yaml`: see there."""

    answers: Sequence[str] = ("Hello",)
    peers: Sequence[dict[str, Any]] = ()
    prefill: dict[str, Any] | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    state: str = "ready"
    role: str = "decode"
    parsers: dict[str, str] = field(default_factory=dict)
    template: str | None = None
    keys: dict[str, str] = field(default_factory=dict)
    fails_after: int | None = None
    refuses: str | None = None
    waiting: int = 0
    limits: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 4000


class Script:
    """The tokens of a model that says `answers[seed]`, whichever worker it runs on."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        encoder = Encoder.from_file(str(folder / "tokenizer.json"))
        self._answers = [
            [token for character in text for token in encoder.encode(character).ids] + [END]
            for text in scene.answers
        ]

    def token(self, spec: RequestSpec, position: int) -> Token:
        sampling = spec.sampling
        ids = self._answers[sampling.seed % len(self._answers)]
        token_id = ids[position % len(ids)]
        is_stop = token_id in sampling.stop_token_ids
        is_end = is_stop or (token_id in sampling.eos_token_ids and not sampling.ignore_eos)
        has_ended = position >= sampling.min_tokens and is_end
        is_last = position == sampling.max_tokens - 1
        count = sampling.logprobs
        likely = [(token_id, -0.5), *((other, -1.0 - other) for other in range(count or 0))]
        return Token(
            spec.request_id,
            token_id,
            None if count is None else -0.5,
            [] if count is None else likely[:count],
            "stop" if has_ended else "length" if is_last else None,
            token_id if has_ended and is_stop else None,
            cached_tokens=0 if position else 8,
            prompt_logprobs=[] if position else _prompt_logprobs(spec),
        )


def _prompt_logprobs(spec: RequestSpec) -> list[PromptLogprob]:
    count = spec.sampling.prompt_logprobs
    likely = [(65, -0.25), (66, -1.5)][:count]
    places = range(1, 1 if count is None else len(spec.prompt))
    return [PromptLogprob(-float(place), 2, likely) for place in places]


class SteppingEngine(ScriptedEngine):
    """One token of each running request a step."""

    def __init__(self, script: Script, scene: Scene) -> None:
        super().__init__()
        self.answer = self._take
        self._script, self._scene = script, scene
        self._received: dict[str, RequestSpec] = {}
        self._running: dict[str, tuple[RequestSpec, int]] = {}
        self._submitted = asyncio.Event()

    def _take(self, message: EngineInput) -> Sequence[EngineOutput]:
        match message:
            case Submit(spec=spec):
                if self._scene.refuses is not None:
                    refusal = RequestFailed(spec.request_id, self._scene.refuses, is_refusal=True)
                    return [refusal]
                self._running[spec.request_id] = spec, len(spec.output)
            case Receive(spec=spec):
                self._received[spec.request_id] = spec
                num_blocks = -(-len(spec.prompt) // FACTS.geometry.block_size)
                return [ReceiveReady(spec.request_id, EPOCH, 0, list(range(num_blocks)))]
            case ReceiveDone(request_id=request_id) | ReceiveFailed(request_id=request_id):
                spec = self._received.pop(request_id)
                kept = 0 if message.first is None else 1
                self._running[request_id] = spec, len(spec.output) + kept
            case Abort(request_id=request_id):
                self._running.pop(request_id, None)
        if self._running and not self._scene.waiting:
            self._submitted.set()
        return []

    async def run(self) -> None:
        while True:
            await self._submitted.wait()
            for _ in range(TURNS):
                await asyncio.sleep(0)
            self.say(*self._step())
            if not self._running:
                self._submitted.clear()

    def _step(self) -> list[EngineOutput]:
        tokens: list[Token] = []
        for request_id, (spec, position) in list(self._running.items()):
            if position == self._scene.fails_after:
                del self._running[request_id]
                return [RequestFailed(request_id, "the step failed")]
            tokens.append(self._script.token(spec, position))
            self._running[request_id] = spec, position + 1
            if tokens[-1].finish_reason is not None:
                del self._running[request_id]
        return [Tokens(tokens)] if tokens else []


class PrefillPeer(RecordingPeer):
    """A prefill worker that grants a credit at once.  fails: before, or after its first token."""

    broker: CreditBroker

    def __init__(self, script: Script, *, fails: str = "") -> None:
        super().__init__("prefill-0")
        self._script, self._fails = script, fails

    def claim(self, request_id: str, tokens: int, priority: int) -> None:
        super().claim(request_id, tokens, priority)
        asyncio.get_running_loop().call_soon(self.broker.on_credit, self, request_id, True)

    async def prefill(
        self, spec: RequestSpec, target: TransferTarget
    ) -> AsyncGenerator[Token | PrefillDone, None]:
        if self._fails == "before":
            raise PeerError("gone")
        yield self._script.token(spec, len(spec.output))
        if self._fails == "after":
            raise PeerError("gone")
        yield PrefillDone(spec.request_id, num_bytes=64, seconds=0.01)


class DecodePeer:
    """A decode worker.  fails_after: so many own tokens; never_begins: makes no first one."""

    is_draining = restarts_grammar = hands_over_kv = False

    def __init__(self, script: Script, key: str, **does: Any) -> None:
        self.key, self._script, self._does = key, script, does
        self.load = WorkerLoad(num_running=does.get("num_running", 0))

    async def generate(
        self, spec: RequestSpec, prefill: PrefillMode
    ) -> AsyncGenerator[Generated, None]:
        if self._does.get("never_begins") and not spec.output:
            await asyncio.Event().wait()
        begins = len(spec.output)
        for position in range(begins, spec.sampling.max_tokens):
            if position - begins == self._does.get("fails_after"):
                raise PeerError("reset")
            token = self._script.token(spec, position)
            yield Generated(token, "local" if position == begins else None)
            if token.finish_reason is not None:
                return


@dataclass(frozen=True)
class Served:
    """A worker that is listening."""

    port: int
    engine: ScriptedEngine
    metrics: Metrics


@asynccontextmanager
async def serving(scene: Scene, model: Path, folder: Path) -> AsyncIterator[Served]:
    """Run the worker of a scene.  model: its folder; folder: an empty one for policy and keys."""
    script = Script(scene, model)
    engine, policy = SteppingEngine(script, scene), _policy(scene, folder)
    client = EngineClient(engine)
    facts = replace(FACTS, vocab_size=END + 1, max_model_len=scene.max_model_len, num_blocks=1000)
    engines, metrics = Engines(Engine(client, facts, "127.0.0.1:9100")), Metrics()
    EngineMetrics(metrics, time.monotonic)
    worker = WorkerContext("decode", engines, metrics, policy)
    worker.state = "ready"
    backend = WorkerBackend("tiny", engines)
    if scene.state != "loading":
        backend.engines_are_ready()
        backend.serve(_node(worker, script, scene))
        worker.announce("ready" if scene.state == "stalled" else scene.state)
    if scene.state == "stalled":
        client.stall("it makes no progress")
    limits = dataclasses.replace(limits_of(policy.http_limits), **scene.limits)
    options: dict[str, Any] = {"limits": lambda: limits}
    if scene.keys:
        options["tenant_of"] = ApiKeys(_keys(scene, folder)).tenant_of
    if scene.role == "prefill":
        app = create_prefill_app(backend, metrics, lambda: policy, **options)
    else:
        tokenizer = Tokenizer.load(model, scene.template)
        parsers = ParserNames(**scene.parsers)
        app = create_app(backend, tokenizer, metrics, lambda: policy, parsers=parsers, **options)
    server = await serve(app, "127.0.0.1", 0, options["limits"])
    tasks = [asyncio.create_task(client.run()), asyncio.create_task(engine.run())]
    try:
        yield Served(server.port, engine, metrics)
    finally:
        await server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _node(worker: WorkerContext, script: Script, scene: Scene) -> Any:
    """Wire dispatch as a decode worker does, to peers that are played."""
    prefills = [] if scene.prefill is None else [PrefillPeer(script, **scene.prefill)]
    decodes = [DecodePeer(script, **peer) for peer in scene.peers]
    broker = CreditBroker(
        worker.credit_queue, lambda: prefills, lambda: worker.policy.prefill_score, 8
    )
    for peer in prefills:
        peer.broker = broker
    here = DecodeDispatcher(
        worker, RemotePrefill(worker, broker), lambda: prefills, lambda: decodes
    )
    ingress = Ingress(worker, here, lambda: decodes)
    if decodes:
        busy_here(ingress)
    return SimpleNamespace(
        ingress=ingress,
        worker=worker,
        verification=None,
        problem=lambda: None if worker.state == "ready" else f"this worker is {worker.state}",
        num_ingresses=lambda: 1,
        decodes=lambda: decodes,
    )


def _policy(scene: Scene, folder: Path) -> PolicyConfig:
    path = folder / "policy.yaml"
    path.write_text(json.dumps(scene.policy))
    return PolicyFile(path).current


def _keys(scene: Scene, folder: Path) -> Path:
    keys = folder / "keys"
    keys.mkdir()
    for name, key in scene.keys.items():
        (keys / name).write_text(key)
    return keys
