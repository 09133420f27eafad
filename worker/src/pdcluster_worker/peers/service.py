"""The gRPC service that other workers of the revision call."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Protocol

import grpc
import msgspec
from msgspec.structs import replace

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.peers import (
    ClaimCredit,
    CreditReply,
    Hello,
    OpenCredits,
    PrefillReply,
    ReleaseCredit,
    Report,
    VerificationResult,
    VerifyCall,
    decode_ask,
    decode_credit_call,
    decode_hello,
    decode_verify,
    decode_watch,
    encode,
)
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget
from pdcluster_worker.peers.calls import (
    SERVER_OPTIONS,
    Context,
    RefusalError,
    answering,
    bind,
    method_handlers,
    parsed,
    send_head,
)
from pdcluster_worker.peers.checks import parse_prefill, parse_prefix_pushed, parse_push_prefix
from pdcluster_worker.peers.generate_service import Generates, GenerateService, refusal_of_engine
from pdcluster_worker.peers.pair_check import Refusals
from pdcluster_worker.peers.tls import Credentials
from pdcluster_worker.routing.batching import Grant
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.tracing import trace_context

Answers = asyncio.Queue[tuple[str, bool]]
"""(request id, granted) on their way to one peer."""


class CreditServer:
    """The prefill side of credits: joins the ledger to the stream of each decode worker, a peer
    named by its engine id.
    """

    def __init__(self, ledger: CreditLedger) -> None:
        self._ledger = ledger
        self._streams: dict[str, Answers] = {}
        self._timer: asyncio.TimerHandle | None = None

    def open(self, peer: str) -> Answers:
        """Begin a peer's stream: credits of an earlier one are void."""
        answers: Answers = asyncio.Queue()
        self._streams[peer] = answers
        self.push(self._ledger.drop_peer(peer))
        return answers

    def close(self, peer: str, answers: Answers) -> None:
        """A no-op when a later stream has taken its place."""
        if self._streams.get(peer) is answers:
            del self._streams[peer]
            self.push(self._ledger.drop_peer(peer))

    def claim(self, peer: str, request_id: str, tokens: int, priority: int) -> None:
        """Raises ValueError for an impossible one."""
        own = Grant(peer, request_id)
        granted = self._ledger.claim(peer, request_id, tokens, priority)
        self._answer(own, own in granted)
        self.push(grant for grant in granted if grant != own)

    def release(self, peer: str, request_id: str) -> None:
        self.push(self._ledger.release(peer, request_id))

    def start(self, peer: str, request_id: str) -> bool:
        """False when the peer has no credit for the request."""
        return self._ledger.start(peer, request_id)

    def finish(self, peer: str, request_id: str) -> None:
        """A second time is a no-op."""
        self.push(self._ledger.finish(peer, request_id))

    def push(self, grants: Iterable[Grant]) -> None:
        """Send each peer its new grants, and return when the next group is due."""
        for grant in grants:
            self._answer(grant, True)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := self._ledger.due) is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._on_due)

    def _on_due(self) -> None:
        self._timer = None
        self.push(self._ledger.grant_due())

    def _answer(self, grant: Grant, granted: bool) -> None:
        # Without a stream the peer has just gone, and `close` has dropped what it held.
        if (answers := self._streams.get(grant.peer)) is not None:
            answers.put_nowait((grant.request_id, granted))


MAX_HASHES = 1 << 15
"""Bound of one report: 1.1 MB with SHA-256, some 20 ms in the event loops of both sides."""

logger = logging.getLogger(__name__)


Verify = Callable[[VerifyCall], Awaitable[VerificationResult]]


class WorkerHandler(Generates, Protocol):
    """Serves the calls of peers, in `serving`."""

    @property
    def ledger(self) -> CreditLedger: ...

    @property
    def needs_credit(self) -> bool:
        """True if a prefill needs a credit of the ledger."""
        ...

    def hello(self) -> Hello: ...

    def prefill(
        self, peer: str, spec: RequestSpec, target: TransferTarget
    ) -> AsyncGenerator[Token | PrefillDone, None]:
        """For the decode worker `peer`: the first token, then PrefillDone unless that token is the
        last.
        """
        ...

    def receive_prefix(
        self, spec: RequestSpec, given: Callable[[], Awaitable[tuple[Token, PrefillDone]]]
    ) -> AsyncGenerator[TransferTarget, None]:
        """Blocks for the KV of a prefix, which is there once `given` has returned."""
        ...

    async def ask(self, path: str, body: bytes) -> bytes:
        """POST to the front end of the engine here.  Raises RequestError, PeerError."""
        ...

    def watch(self) -> AsyncGenerator[Report, None]:
        """A snapshot, then reports until closed."""
        ...


class WorkerService:
    """Refuses calls for another engine, without a credit or with an impossible message, and ends
    the handler's iterator the moment a call is cancelled.

    One per worker: the methods of `calls.WorkerStub`.

    They write to their context: a generator that is cancelled between two answers would be
    closed only when it is collected, with its handler.
    """

    def __init__(
        self, handler: WorkerHandler, refusals: Refusals, verify: Verify | None = None
    ) -> None:
        """verify: None = not a decode worker."""
        self.credit_server = CreditServer(handler.ledger)
        self._handler = handler
        self._refusals = refusals
        self._verify = verify
        self._calls = set[asyncio.Task[Any]]()

    async def ended(self, seconds: float) -> None:
        """Wait, after the server has stopped, until every call has ended: gRPC cancels those that
        are open and does not wait for them.
        """
        if self._calls:
            _, still_open = await asyncio.wait(self._calls, timeout=seconds)
            if still_open:
                logger.warning("calls of peers still open calls=%d", len(still_open))

    @asynccontextmanager
    async def _answering(self, context: Context) -> AsyncIterator[None]:
        if (call := asyncio.current_task()) is not None:
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        async with answering(context):
            yield

    async def handshake(self, message: bytes, context: Context) -> bytes:
        """Answer with our facts in any case: the other side compares too."""
        mine = self._handler.hello()
        async with self._answering(context):
            self._refusals.check(mine, parsed(decode_hello, message))
        return encode(mine)

    async def generate(self, frames: AsyncIterator[bytes], context: Context) -> None:
        async with self._answering(context):
            await GenerateService(self._handler, context).serve(frames)

    async def prefill(self, message: bytes, context: Context) -> None:
        async with self._answering(context):
            call = parsed(parse_prefill, message)
            self._check_engine(call.engine_id)
            trace_context.receive(context.invocation_metadata())
            spec, target = call.spec, call.target
            # a worker of several engines has one name for credits
            peer = call.worker_id or target.engine_id
            self._check_pair(peer)
            if not self._handler.needs_credit:
                await self._prefill(peer, spec, target, context)
                return
            if not self.credit_server.start(peer, spec.request_id):
                raise RefusalError(
                    f"request {spec.request_id} of engine {peer} has no credit here: ask for one "
                    "first"
                )
            try:
                await self._prefill(peer, spec, target, context)
            finally:
                self.credit_server.finish(peer, spec.request_id)

    async def _prefill(
        self, peer: str, spec: RequestSpec, target: TransferTarget, context: Context
    ) -> None:
        async with aclosing(self._handler.prefill(peer, spec, target)) as replies:
            async for reply in replies:
                if isinstance(reply, PrefillDone):
                    await context.write(encode(PrefillReply(done=reply)))
                else:
                    # The engine has room again: credits are for computing, the transfer goes on
                    # at the same time.
                    self.credit_server.finish(peer, spec.request_id)
                    await context.write(encode(PrefillReply(first_token=reply)))

    async def push_prefix(self, messages: AsyncIterator[bytes], context: Context) -> None:
        async with self._answering(context):
            messages = aiter(messages)
            call = parsed(parse_push_prefix, await anext(messages, b""))
            self._check_engine(call.engine_id)
            self._check_pair(call.worker_id)

            async def given() -> tuple[Token, PrefillDone]:
                message = await anext(messages, None)
                if message is None:
                    raise RequestError("the giver broke off")
                pushed = parsed(partial(parse_prefix_pushed, call.spec.request_id), message)
                return pushed.first_token, pushed.done

            async with aclosing(self._handler.receive_prefix(call.spec, given)) as targets:
                async for target in targets:
                    await context.write(encode(target))

    async def credits(self, messages: AsyncIterator[bytes], context: Context) -> None:
        async with self._answering(context):
            messages = aiter(messages)
            first = parsed(decode_credit_call, await anext(messages, b""))
            if not isinstance(first, OpenCredits):
                raise RequestError(
                    "the first message of a credits stream must name the engine id of the decode "
                    "worker"
                )
            peer = first.engine_id
            self._check_pair(peer)
            await send_head(context)
            answers = self.credit_server.open(peer)
            writer = asyncio.create_task(_write_answers(answers, context))
            try:
                async for message in messages:
                    self._on_credit_call(peer, parsed(decode_credit_call, message))
            finally:
                self.credit_server.close(peer, answers)
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def watch(self, message: bytes, context: Context) -> None:
        async with self._answering(context):
            self._check_engine(parsed(decode_watch, message).engine_id)
            sequence = 0
            async with aclosing(self._handler.watch()) as reports:
                async for report in reports:
                    for part in report.parts(MAX_HASHES):
                        sequence += 1
                        await context.write(encode(replace(part, sequence=sequence)))

    async def ask(self, message: bytes, context: Context) -> bytes:
        answers = list[bytes]()
        async with self._answering(context):
            call = parsed(decode_ask, message)
            self._check_engine(call.engine_id)
            answers.append(await self._handler.ask(call.path, call.body))
        return b"".join(answers)

    async def verify(self, message: bytes, context: Context) -> None:
        async with self._answering(context):
            call = parsed(decode_verify, message)
            if self._verify is None:
                raise RequestError("only decode workers verify transfers", status=404)
            await context.write(msgspec.json.encode(await self._verify(call)))

    def _on_credit_call(self, peer: str, call: OpenCredits | ClaimCredit | ReleaseCredit) -> None:
        match call:
            case ClaimCredit():
                try:
                    self.credit_server.claim(peer, call.request_id, call.tokens, call.priority)
                except ValueError as e:
                    raise RequestError(str(e)) from e
            case ReleaseCredit():
                self.credit_server.release(peer, call.request_id)

    def _check_engine(self, engine_id: str) -> None:
        if engine_id != self._handler.engine_id:
            raise RefusalError(refusal_of_engine(engine_id, self._handler.engine_id))

    def _check_pair(self, engine_id: str) -> None:
        reason = self._refusals.reason(engine_id)
        if reason is not None:
            raise RefusalError(f"the pair with engine {engine_id} is refused: {reason}")


async def _write_answers(answers: Answers, context: Context) -> None:
    while True:
        await context.write(encode(CreditReply(*await answers.get())))


async def start_grpc(
    service: WorkerService, host: str, port: int, credentials: Credentials
) -> tuple[grpc.aio.Server, int]:
    """Listen on `port` (0: any free one); returns the server and the port.

    Raises ConfigError when the address cannot be used.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((method_handlers(service),))
    bound_port = bind(server, "listen.grpc", host, port, credentials.server())
    await server.start()
    return server, bound_port
