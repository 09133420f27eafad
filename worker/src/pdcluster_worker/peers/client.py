"""The client side of a pair: one remote worker, from the handshake to its streams.

connecting -> ready -> lost -> (back-off) connecting ...; refused is final for
this engine id.  While ready the peer's load, its prefix cache and, of a
prefill worker, its credits are kept by two streams; a break of either loses
the peer until it has shaken hands again.  Which peers exist is `directory`'s
business, which one serves a request `dispatch`'s.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, TypeVar

from pdcluster_worker.errors import PeerError, WorkerError
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.peers import Hello, PrefillMode, WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget
from pdcluster_worker.peers import convert
from pdcluster_worker.peers.calls import Replies, unary
from pdcluster_worker.peers.channel import PeerChannel
from pdcluster_worker.peers.generate_client import RemoteStream
from pdcluster_worker.peers.reconnect import FIRST_BACKOFF_SECONDS, Reconnect
from pdcluster_worker.peers.records import WorkerRecord
from pdcluster_worker.peers.refusals import Refusals
from pdcluster_worker.peers.tasks import run_until_first_ends
from pdcluster_worker.peers.tls import Credentials
from pdcluster_worker.proto import worker_pb2 as pb
from pdcluster_worker.routing.event_order import EventOrder, GapCheck
from pdcluster_worker.routing.prefix_index import PrefixIndex
from pdcluster_worker.tracing import trace_context

logger = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT")
OutputT = TypeVar("OutputT")

CreditRequests = asyncio.Queue[pb.CreditRequest | None]
"""Messages out on a Credits stream; None ends it."""

PeerState = Literal["connecting", "ready", "refused", "lost"]

HANDSHAKE_SECONDS = 2.0


@dataclass(frozen=True)
class PeerEvents:
    """Callbacks of a peer: plain functions that must not block.

    on_credit: (peer, request id, granted); not granted = queued there, a grant follows.
    on_lost:   the peer was ready and is no more: all its answers and grants are void.
    on_change: the peer's state changed, or whether it takes new work.
    """

    on_credit: "Callable[[Peer, str, bool], None]"
    on_lost: "Callable[[Peer], None]"
    on_change: "Callable[[Peer], None]"


NO_EVENTS = PeerEvents(on_credit=lambda *_: None, on_lost=lambda _: None, on_change=lambda _: None)


@dataclass(frozen=True)
class LocalWorker:
    """This worker's side, shared by all its peers."""

    hello: Hello
    credentials: Credentials
    refusals: Refusals
    index: PrefixIndex


class Peer:
    """One remote worker under one engine id.

    key:   its pod.
    state: see the module; `ready` says whether it takes new work.
    load:  of its last report.
    hello: of the last handshake; None before the first.
    """

    def __init__(self, record: WorkerRecord, local: LocalWorker, events: PeerEvents) -> None:
        self.key = record.pod
        self.record = record
        self.state: PeerState = "connecting"
        self.load = WorkerLoad()
        self.hello: Hello | None = None
        self._local = local
        self._events = events
        self._channel = self._open()
        self._claims: CreditRequests = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name=f"peer {self.key}")

    @property
    def ready(self) -> bool:
        """Connected, matched, and not draining, by its record and (sooner, and without etcd) by its
        reports.
        """
        return self.state == "ready" and self.record.state == self.load.state == "ready"

    @property
    def is_draining(self) -> bool:
        """Connected, and about to go: it serves what runs there to the end."""
        return self.state == "ready" and "draining" in (self.record.state, self.load.state)

    @property
    def has_drained(self) -> bool:
        """True if it has sent every answer, by its record or its last report."""
        return "drained" in (self.record.state, self.load.state)

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request there; 0 = unknown."""
        return 0 if self.hello is None else self.hello.max_model_len

    @property
    def max_batched_tokens(self) -> int:
        """Token budget of one step of all its engines; 0 = unknown."""
        return 0 if self.hello is None else self.hello.max_batched_tokens

    @property
    def restarts_grammar(self) -> bool:
        """True if its engine cannot go on with a structured answer that has begun."""
        return self.hello is not None and self.hello.restarts_grammar

    async def leave(self) -> None:
        """Let go of a worker that is no member any more: end the streams and every call, but not
        those to one that has drained.

        That one has sent every answer before etcd says that it is gone, but we may not have read
        them yet.  Any other may hang, with a connection that goes on answering pings.
        """
        has_drained = self.has_drained
        await self._end_streams()
        try:
            if has_drained:
                await self._channel.idle()
        finally:
            await self._channel.close()

    async def close(self) -> None:
        """End the streams and every call."""
        await self._end_streams()
        await self._channel.close()

    async def _end_streams(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._change("lost")

    def take_record(self, record: WorkerRecord) -> None:
        """Take a newer record of the same worker."""
        before, self.record = self._standing, record
        self._report_change(before)

    # --- what dispatch asks of it -----------------------------------------------------------------

    def prefix_match(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of `hashes` that its prefix cache holds, as far as is known here."""
        return self._local.index.match(self.key, hashes)

    def claim(self, request_id: str, tokens: int, priority: int) -> None:
        """Ask for a credit; answered through `on_credit`, or by `on_lost`."""
        self._claims.put_nowait(
            pb.CreditRequest(want=pb.Want(request_id=request_id, tokens=tokens, priority=priority))
        )

    def release(self, request_id: str) -> None:
        """Give back a want or a grant; a no-op for one that has been used."""
        self._claims.put_nowait(pb.CreditRequest(release=request_id))

    def generate(self, spec: RequestSpec, prefill: PrefillMode) -> RemoteStream:
        """Run a request there; closing the answer cancels it.

        It raises PeerError, or RequestError as raised there.
        """
        return RemoteStream(
            self._channel.generating, (self.key, self.record.engine_id), spec, prefill
        )

    async def prefill(
        self, spec: RequestSpec, target: TransferTarget
    ) -> AsyncGenerator[Token | PrefillDone, None]:
        """Prefill there, into `target`, with a credit: the first token, then PrefillDone unless
        that token ended the request.

        Closing the iterator cancels it.  Raises PeerError, or RequestError as raised there.
        """
        request = pb.PrefillRequest(
            request=convert.request_to_proto(spec),
            engine_id=self.record.engine_id,
            target=convert.target_to_proto(target),
            worker_id=self._local.hello.engine_id,
        )
        finished = False
        with self._channel.request() as stub:
            async with aclosing(
                Replies(lambda: stub.Prefill(request, metadata=trace_context.metadata()))
            ) as answers:
                async for reply in answers:
                    if reply.WhichOneof("reply") == "done":
                        finished = True
                        yield _parsed(convert.done_from_proto, spec.request_id, reply.done)
                    else:
                        token = _parsed(
                            convert.token_from_proto, spec.request_id, reply.first_token
                        )
                        finished = token.finish_reason is not None
                        yield token
        if not finished:
            raise PeerError("the prefill broke off")

    async def push(
        self,
        spec: RequestSpec,
        write: Callable[[TransferTarget], Awaitable[tuple[Token, PrefillDone]]],
    ) -> bool:
        """Have it take the KV of a prefix, which `write` writes to the blocks that it names.

        False where it has no room.  Raises PeerError, or RequestError as raised there.
        """
        written: asyncio.Future[pb.GiveRequest] = asyncio.get_running_loop().create_future()

        async def requests() -> AsyncGenerator[pb.GiveRequest, None]:
            yield pb.GiveRequest(
                engine_id=self.record.engine_id,
                worker_id=self._local.hello.engine_id,
                request=convert.request_to_proto(spec),
            )
            yield await written

        try:
            with self._channel.request() as stub:
                async with aclosing(Replies(lambda: stub.Give(requests()))) as replies:
                    async for reply in replies:
                        target = _parsed(
                            lambda _, it: convert.target_from_proto(it), "", reply.target
                        )
                        first, done = await write(target)
                        written.set_result(
                            pb.GiveRequest(
                                first_token=convert.token_to_proto(first),
                                done=convert.done_to_proto(done),
                            )
                        )
        finally:
            was_written = written.done() and not written.cancelled()
            written.cancel()  # gRPC waits for the requests of a call that has ended
        return was_written

    # --- the pair ---------------------------------------------------------------------------------

    def _open(self) -> PeerChannel:
        return PeerChannel(self.record.grpc_address, self._local.credentials.channel)

    async def _show_newest_certificate(self) -> None:
        """Open a channel; it shows the certificate that it was opened with, so a new certificate
        needs a new channel.
        """
        if self._channel.credentials is not self._local.credentials.channel:
            old, self._channel = self._channel, self._open()
            await old.close()

    async def _run(self) -> None:
        retry = Reconnect()
        while True:
            retry.begin()
            has_served = False
            try:
                await self._show_newest_certificate()
                if not await self._shake_hands():
                    self._change("refused")
                    return
                await self._serve()
            except WorkerError as e:
                has_served = self.state == "ready"
                self._on_broken(e)
            # a fault of ours must not lose this peer: log it, and start over
            except (Exception, asyncio.CancelledError) as e:
                if _is_cancelled():
                    raise
                logger.exception("peer failed pod=%s", self.key)
                self._on_broken(e)
            await retry.pause(has_served=has_served)

    async def _shake_hands(self) -> bool:
        """Compare facts; False when the pair is refused.

        Raises PeerError when another engine answers, or none.
        """
        mine = self._local.hello
        message = await unary(
            lambda: self._channel.stub.Handshake(
                convert.hello_to_proto(mine), timeout=HANDSHAKE_SECONDS
            )
        )
        theirs = _parsed(lambda _, hello: convert.hello_from_proto(hello), "", message)
        if theirs.engine_id != self.record.engine_id:
            raise PeerError(
                f"engine {theirs.engine_id} answers where engine {self.record.engine_id} is "
                "registered"
            )
        self.hello = theirs
        return self._local.refusals.check(mine, theirs) is None

    async def _serve(self) -> None:
        self._claims = asyncio.Queue()
        self._change("ready")
        if self.record.role == "prefill":
            await run_until_first_ends(self._watch(), self._follow_credits())
        else:
            await self._watch()

    async def _follow_credits(self) -> None:
        claims = self._claims
        try:
            async with aclosing(
                Replies(lambda: self._channel.stub.Credits(self._credit_requests(claims)))
            ) as answers:
                async for reply in answers:
                    self._events.on_credit(self, reply.request_id, reply.granted)
        finally:
            # gRPC keeps waiting for the requests of a call that the other side has ended
            claims.put_nowait(None)
        raise PeerError("the peer ended the credits stream")

    async def _credit_requests(
        self, claims: CreditRequests
    ) -> AsyncGenerator[pb.CreditRequest, None]:
        yield pb.CreditRequest(engine_id=self._local.hello.engine_id)
        while (request := await claims.get()) is not None:
            yield request

    async def _watch(self) -> None:
        """Follow reports; after a gap, from a new snapshot."""
        request = pb.WatchRequest(engine_id=self.record.engine_id)
        while True:
            order = EventOrder()
            async with aclosing(Replies(lambda: self._channel.stub.Watch(request))) as reports:
                async for report in reports:
                    arrival = order.arrival(report.sequence)
                    if arrival is GapCheck.GET_SNAPSHOT:
                        logger.info("watch gap peer=%s sequence=%d", self.key, report.sequence)
                        break
                    if arrival is GapCheck.APPLY:
                        self._on_report(report)
                else:
                    raise PeerError("the peer ended the watch")
            await asyncio.sleep(FIRST_BACKOFF_SECONDS)

    def _on_report(self, report: pb.WorkerReport) -> None:
        load = _parsed(lambda _, load: convert.load_from_proto(load), "", report.load)
        before, self.load = self._standing, load
        self._report_change(before)
        if report.snapshot:
            self._local.index.snapshot(self.key, report.blocks_stored)
        else:
            self._local.index.apply(self.key, report.blocks_stored, report.blocks_removed)

    @property
    def _standing(self) -> tuple[bool, bool]:
        return self.ready, self.has_drained

    def _report_change(self, before: tuple[bool, bool]) -> None:
        if self._standing != before:
            self._events.on_change(self)

    def _on_broken(self, error: BaseException) -> None:
        if self.state != "lost":
            logger.warning(
                "lost peer pod=%s engine=%s reason=%s", self.key, self.record.engine_id, error
            )
        self._change("lost")

    def _change(self, state: PeerState) -> None:
        was, self.state = self.state, state
        if was == state:
            return
        if was == "ready":
            self._local.index.drop(self.key)
            self._events.on_lost(self)
        self._events.on_change(self)


def _is_cancelled() -> bool:
    """Return whether the running task is to end; False where the cancellation of something else
    came out here.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _parsed(parse: Callable[[str, ReplyT], OutputT], request_id: str, message: ReplyT) -> OutputT:
    try:
        return parse(request_id, message)
    except ValueError as e:
        raise PeerError(f"the peer sent an impossible answer: {e}") from e
