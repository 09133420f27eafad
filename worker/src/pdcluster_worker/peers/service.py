"""The gRPC service that other workers of the revision call; `dispatch` is behind it.

It refuses what is not meant for this engine, what has no credit and what no
worker of ours would send, and ends the handler's iterator the moment a call is
cancelled.  What a request's tokens are is the handler's business; which want is
granted a credit is the ledger's.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.peers import Hello, Report
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget
from pdcluster_worker.peers import convert
from pdcluster_worker.peers.credit_server import Answers, CreditServer
from pdcluster_worker.peers.generate_service import Generates, GenerateService, refusal_of_engine
from pdcluster_worker.peers.refusals import Refusals
from pdcluster_worker.peers.status import Context, RefusalError, answering, send_head
from pdcluster_worker.proto import worker_pb2 as pb
from pdcluster_worker.proto.worker_pb2_grpc import WorkerServicer
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.tracing import trace_context

MAX_HASHES = 1 << 15
"""Bound of one report: 1.1 MB with SHA-256, some 20 ms in the event loops of both sides."""

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")
ValueT = TypeVar("ValueT")


class WorkerHandler(Generates, Protocol):
    """Calls that `dispatch` serves for peers."""

    @property
    def ledger(self) -> CreditLedger:
        """Credits of this worker's engine."""
        ...

    @property
    def needs_credit(self) -> bool:
        """True if a prefill needs a credit of the ledger."""
        ...

    def hello(self) -> Hello:
        """This side of a handshake."""
        ...

    def prefill(
        self, peer: str, spec: RequestSpec, target: TransferTarget
    ) -> AsyncGenerator[Token | PrefillDone, None]:
        """Prefill for the decode engine `peer`: the first token, then PrefillDone unless that token
        ended the request.
        """
        ...

    def receive_prefix(
        self, spec: RequestSpec, given: Callable[[], Awaitable[tuple[Token, PrefillDone]]]
    ) -> AsyncGenerator[TransferTarget, None]:
        """Blocks for the KV of a prefix, which is there once `given` has returned."""
        ...

    def watch(self) -> AsyncGenerator[Report, None]:
        """A snapshot, then reports until closed."""
        ...


class WorkerService(WorkerServicer):
    """One per worker.  `credit_server` is where grants that come without a peer's call (a new
    limit, `resume`) are pushed.

    The calls are coroutines that write to their context, which gRPC allows and
    the generated types do not know: a generator that is cancelled between two
    answers would be closed only when it is collected, with its handler.
    """

    def __init__(self, handler: WorkerHandler, refusals: Refusals) -> None:
        self.credit_server = CreditServer(handler.ledger)
        self._handler = handler
        self._refusals = refusals
        self._calls = set[asyncio.Task[Any]]()

    async def ended(self, seconds: float) -> None:
        """Wait, after the server has stopped, until every call has let go of what it held.

        gRPC cancels the calls that are open and does not wait for them.  A task of its that the
        end of the event loop cancels as well prints a traceback.
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

    async def Handshake(self, request: pb.Hello, context: Context) -> pb.Hello:
        """Note a mismatch, and answer with our facts in any case: the other side compares too."""
        mine = self._handler.hello()
        async with self._answering(context):
            self._refusals.check(mine, _parsed(convert.hello_from_proto, request))
        return convert.hello_to_proto(mine)

    async def Generate(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.Frame], context: Context
    ) -> None:
        """Run what one peer asks for, until its stream ends."""
        async with self._answering(context):
            await GenerateService(self._handler, context).serve(request_iterator)

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> None:  # type: ignore[override]
        """Stream the first token and the end of a remote prefill."""
        async with self._answering(context):
            self._check_engine(request.engine_id)
            trace_context.receive(context.invocation_metadata())
            spec = _parsed(convert.request_from_proto, request.request)
            target = _parsed(convert.target_from_proto, request.target)
            # a worker of several engines has one name for credits
            peer = request.worker_id or target.engine_id
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
                    await context.write(pb.PrefillReply(done=convert.done_to_proto(reply)))
                else:
                    # The engine has room again: credits are for computing, the transfer goes on
                    # beside it.
                    self.credit_server.finish(peer, spec.request_id)
                    await context.write(pb.PrefillReply(first_token=convert.token_to_proto(reply)))

    async def Give(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.GiveRequest], context: Context
    ) -> None:
        """Take the KV of a prefix from a decode worker."""
        async with self._answering(context):
            requests = aiter(request_iterator)
            first = await anext(requests, pb.GiveRequest())
            self._check_engine(first.engine_id)
            self._check_pair(first.worker_id)
            spec = _parsed(convert.request_from_proto, first.request)

            async def given() -> tuple[Token, PrefillDone]:
                second = await anext(requests, None)
                if second is None:
                    raise RequestError("the giver broke off")
                token = partial(convert.token_from_proto, spec.request_id)
                done = partial(convert.done_from_proto, spec.request_id)
                return _parsed(token, second.first_token), _parsed(done, second.done)

            async with aclosing(self._handler.receive_prefix(spec, given)) as targets:
                async for target in targets:
                    await context.write(pb.GiveReply(target=convert.target_to_proto(target)))

    async def Credits(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.CreditRequest], context: Context
    ) -> None:
        """Serve one decode worker's wants until its stream ends."""
        async with self._answering(context):
            first = await anext(aiter(request_iterator), pb.CreditRequest())
            peer = first.engine_id
            if not peer:
                raise RequestError(
                    "the first message of Credits must name the engine id of the decode worker"
                )
            self._check_pair(peer)
            await send_head(context)
            answers = self.credit_server.open(peer)
            writer = asyncio.create_task(_write_answers(answers, context))
            try:
                self._on_credit_request(peer, first)
                async for request in request_iterator:
                    self._on_credit_request(peer, request)
            finally:
                self.credit_server.close(peer, answers)
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # type: ignore[override]
        """Stream numbered reports until cancelled."""
        async with self._answering(context):
            self._check_engine(request.engine_id)
            sequence = 0
            async with aclosing(self._handler.watch()) as reports:
                async for report in reports:
                    for part in report.parts(MAX_HASHES):
                        sequence += 1
                        await context.write(convert.report_to_proto(sequence, part))

    def _on_credit_request(self, peer: str, request: pb.CreditRequest) -> None:
        match request.WhichOneof("request"):
            case "want":
                claim = request.want
                try:
                    self.credit_server.claim(peer, claim.request_id, claim.tokens, claim.priority)
                except ValueError as e:
                    raise RequestError(str(e)) from e
            case "release":
                self.credit_server.release(peer, request.release)

    def _check_engine(self, engine_id: str) -> None:
        if engine_id != self._handler.engine_id:
            raise RefusalError(refusal_of_engine(engine_id, self._handler.engine_id))

    def _check_pair(self, engine_id: str) -> None:
        reason = self._refusals.reason(engine_id)
        if reason is not None:
            raise RefusalError(f"the pair with engine {engine_id} is refused: {reason}")


async def _write_answers(answers: Answers, context: Context) -> None:
    while True:
        request_id, granted = await answers.get()
        await context.write(pb.CreditReply(request_id=request_id, granted=granted))


def _parsed(parse: Callable[[MessageT], ValueT], message: MessageT) -> ValueT:
    """Read a message of a peer.  Raises RequestError 400 for impossible values."""
    try:
        return parse(message)
    except ValueError as e:
        raise RequestError(str(e)) from e
