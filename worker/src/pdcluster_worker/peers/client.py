"""The client side of a pair: one remote worker, from the handshake to its streams.

connecting -> ready -> lost -> (back-off) connecting ...; refused is final for this engine id.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pdcluster_worker.backoff import FIRST_BACKOFF_SECONDS, Reconnect, run_until_first_ends
from pdcluster_worker.errors import PeerError, WorkerError
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.peers import (
    AskCall,
    ClaimCredit,
    Hello,
    OpenCredits,
    PrefillCall,
    PrefillMode,
    PrefixPushed,
    PushPrefix,
    ReleaseCredit,
    Report,
    WatchCall,
    WorkerLoad,
    decode_credit_reply,
    decode_hello,
    decode_report,
    encode,
)
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget
from pdcluster_worker.peers.calls import Replies, WorkerStub, cancelled_locally, unary
from pdcluster_worker.peers.checks import parse_prefill_reply, parse_target
from pdcluster_worker.peers.generate_client import PeerChannel, RemoteStream
from pdcluster_worker.peers.pair_check import Refusals
from pdcluster_worker.peers.records import WorkerRecord
from pdcluster_worker.peers.tls import Credentials
from pdcluster_worker.routing.prefix_index import EventOrder, GapCheck, PrefixIndex
from pdcluster_worker.tracing import trace_context

logger = logging.getLogger(__name__)

CreditCalls = asyncio.Queue[ClaimCredit | ReleaseCredit | None]
"""Messages out on a stream of credits; None ends it."""

PeerState = Literal["connecting", "ready", "refused", "lost"]

HANDSHAKE_SECONDS = 2.0
ASK_SECONDS = 60.0  # for the longest prompt


@dataclass(frozen=True)
class PeerEvents:
    """Callbacks of a peer, which must not block.

    on_credit: (peer, request id, granted); not granted = queued there, a grant follows.
    on_lost:   the peer was ready and is no more: all its answers and grants are void.
    """

    on_credit: "Callable[[Peer, str, bool], None]"
    on_lost: "Callable[[Peer], None]"
    on_change: "Callable[[Peer], None]"


NO_EVENTS = PeerEvents(on_credit=lambda *_: None, on_lost=lambda _: None, on_change=lambda _: None)


@dataclass(frozen=True)
class LocalWorker:
    hello: Hello
    credentials: Credentials
    refusals: Refusals
    index: PrefixIndex


class Peer:
    """One remote worker under one engine id.  key: its pod.  hello: of the last handshake."""

    def __init__(self, record: WorkerRecord, local: LocalWorker, events: PeerEvents) -> None:
        self.key = record.pod
        self.record = record
        self.state: PeerState = "connecting"
        self.load = WorkerLoad()
        self.hello: Hello | None = None
        self._local = local
        self._events = events
        self._channel = self._open()
        self._credit_calls: CreditCalls = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name=f"peer {self.key}")

    @property
    def ready(self) -> bool:
        """Takes new work, by its record and (sooner, and without etcd) by its reports."""
        return self.state == "ready" and self.record.state == self.load.state == "ready"

    @property
    def is_draining(self) -> bool:
        return self.state == "ready" and "draining" in (self.record.state, self.load.state)

    @property
    def has_drained(self) -> bool:
        """It has sent every answer."""
        return "drained" in (self.record.state, self.load.state)

    @property
    def max_model_len(self) -> int:
        """0 = unknown."""
        return 0 if self.hello is None else self.hello.max_model_len

    @property
    def max_batched_tokens(self) -> int:
        """Token budget of one step of all its engines; 0 = unknown."""
        return 0 if self.hello is None else self.hello.max_batched_tokens

    @property
    def block_size(self) -> int:
        """Tokens of its KV blocks; 0 = unknown."""
        return 0 if self.hello is None else self.hello.geometry.block_size

    @property
    def hands_over_kv(self) -> bool:
        """True if it gives KV of its cache to other decode workers."""
        return self.hello is not None and self.hello.hands_over_kv

    @property
    def restarts_grammar(self) -> bool:
        return self.hello is not None and self.hello.restarts_grammar

    async def leave(self) -> None:
        """End the streams and calls of a worker that is no member; if it has drained, its calls end
        by themselves, for its answers may not have been read.
        """
        has_drained = self.has_drained
        await self._end_streams()
        try:
            if has_drained:
                await self._channel.idle()
        finally:
            await self._channel.close()

    async def close(self) -> None:
        await self._end_streams()
        await self._channel.close()

    async def _end_streams(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._change("lost")

    def take_record(self, record: WorkerRecord) -> None:
        before, self.record = self._standing, record
        self._report_change(before)

    def prefix_match(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of `hashes` in its prefix cache, as far as is known here."""
        return self._local.index.match(self.key, hashes)

    def claim(self, request_id: str, tokens: int, priority: int) -> None:
        """Request a credit; answered by `on_credit` or `on_lost`."""
        self._credit_calls.put_nowait(ClaimCredit(request_id, tokens, priority))

    def release(self, request_id: str) -> None:
        """Give back a claim or a credit; a no-op for one that has been used."""
        self._credit_calls.put_nowait(ReleaseCredit(request_id))

    def generate(self, spec: RequestSpec, prefill: PrefillMode) -> RemoteStream:
        return RemoteStream(self._channel, (self.key, self.record.engine_id), spec, prefill)

    async def prefill(
        self, spec: RequestSpec, target: TransferTarget
    ) -> AsyncGenerator[Token | PrefillDone, None]:
        """The first token, then PrefillDone unless that token ended the request.

        Raises PeerError, or RequestError as raised there.
        """
        call = encode(PrefillCall(spec, self.record.engine_id, target, self._local.hello.engine_id))
        parse = partial(parse_prefill_reply, spec.request_id)
        has_finished = False
        with self._channel.request() as stub:
            metadata = trace_context.metadata()
            async with aclosing(
                Replies(lambda: stub.prefill(call, metadata=metadata), parse)
            ) as replies:
                async for reply in replies:
                    has_finished = isinstance(reply, PrefillDone) or reply.finish_reason is not None
                    yield reply
        if not has_finished:
            raise PeerError("the prefill broke off")

    async def ask(self, path: str, body: bytes) -> bytes:
        """Ask its engine's front end.  Raises PeerError, or RequestError as raised there."""
        if self.state != "ready":
            raise PeerError(f"worker {self.key} is {self.state}")
        call = encode(AskCall(self.record.engine_id, path, body))
        with self._channel.request() as stub:
            return await unary(lambda: stub.ask(call, timeout=ASK_SECONDS), bytes)

    async def push(
        self,
        spec: RequestSpec,
        write: Callable[[TransferTarget], Awaitable[tuple[Token, PrefillDone]]],
    ) -> bool:
        """Send the KV of a prefix, which `write` writes into the blocks that it names; False if it
        has no room.

        Raises PeerError, or RequestError as raised there.
        """
        written: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def messages() -> AsyncGenerator[bytes, None]:
            yield encode(PushPrefix(self.record.engine_id, self._local.hello.engine_id, spec))
            yield await written

        try:
            with self._channel.request() as stub:
                async with aclosing(
                    Replies(lambda: stub.push_prefix(messages()), parse_target)
                ) as targets:
                    async for target in targets:
                        written.set_result(encode(PrefixPushed(*await write(target))))
        finally:
            was_written = written.done() and not written.cancelled()
            written.cancel()  # gRPC waits for the requests of a call that has ended
        return was_written

    def _open(self) -> PeerChannel:
        return PeerChannel(self.record.grpc_address, self._local.credentials.channel)

    async def _run(self) -> None:
        retry = Reconnect()
        while True:
            retry.begin()
            has_served = False
            try:
                # a channel shows the certificate that it was opened with
                if self._channel.credentials is not self._local.credentials.channel:
                    old, self._channel = self._channel, self._open()
                    await old.close()
                if not await self._shake_hands():
                    self._change("refused")
                    return
                await self._serve()
            except WorkerError as e:
                has_served = self.state == "ready"
                self._on_broken(e)
            # a fault of ours must not lose this peer: log it, and start over
            except (Exception, asyncio.CancelledError) as e:
                if cancelled_locally():
                    raise
                logger.exception("peer failed pod=%s", self.key)
                self._on_broken(e)
            await retry.pause(has_served=has_served)

    async def _shake_hands(self) -> bool:
        """False when the pair is refused.  Raises PeerError if another engine answers, or none."""
        mine = self._local.hello
        theirs = await shake_hands(self._channel.stub, mine)
        if theirs.engine_id != self.record.engine_id:
            raise PeerError(
                f"engine {theirs.engine_id} answers where engine {self.record.engine_id} is "
                "registered"
            )
        self.hello = theirs
        return self._local.refusals.check(mine, theirs) is None

    async def _serve(self) -> None:
        self._credit_calls = asyncio.Queue()
        self._change("ready")
        if self.record.role == "prefill":
            await run_until_first_ends(self._watch(), self._follow_credits())
        else:
            await self._watch()

    async def _follow_credits(self) -> None:
        calls = self._credit_calls

        async def messages() -> AsyncGenerator[bytes, None]:
            yield encode(OpenCredits(self._local.hello.engine_id))
            while (call := await calls.get()) is not None:
                yield encode(call)

        try:
            async with aclosing(
                Replies(lambda: self._channel.stub.credits(messages()), decode_credit_reply)
            ) as replies:
                async for reply in replies:
                    self._events.on_credit(self, reply.request_id, reply.granted)
        finally:
            calls.put_nowait(None)  # gRPC waits for the requests of a call that has ended
        raise PeerError("the peer ended the credits stream")

    async def _watch(self) -> None:
        """Follow reports; after a gap, from a new snapshot."""
        call = encode(WatchCall(self.record.engine_id))
        while True:
            order = EventOrder()
            async with aclosing(
                Replies(lambda: self._channel.stub.watch(call), decode_report)
            ) as reports:
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

    def _on_report(self, report: Report) -> None:
        before, self.load = self._standing, report.load
        self._local.index.share(self.key, report.load.store)
        self._report_change(before)
        if report.snapshot:
            self._local.index.snapshot(self.key, report.stored)
        else:
            self._local.index.apply(self.key, report.stored, report.removed)

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


async def shake_hands(stub: WorkerStub, hello: Hello) -> Hello:
    """Raises PeerError, RequestError."""
    return await unary(
        lambda: stub.handshake(encode(hello), timeout=HANDSHAKE_SECONDS), decode_hello
    )
