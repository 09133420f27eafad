"""Serve the calls of peers: implements `peers.service.WorkerHandler` for each role."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from msgspec.structs import replace

from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.engine import (
    Prefill,
    PrefillDone,
    PrefillFailed,
    ReceiveDone,
    ReceiveRefused,
)
from pdcluster_worker.messages.peers import Generated, Hello, PrefillMode, Report
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget
from pdcluster_worker.routing.attempts import PUSH_SECONDS, is_held
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.stock_engine.front_end import EMBEDDINGS, PATHS
from pdcluster_worker.stock_engine.http import HttpFailedError
from pdcluster_worker.tracing.request_trace import trace_migration, trace_prefill


class PeerRequestHandler:
    """One per worker.  dispatcher: of its requests; None on a prefill worker."""

    def __init__(
        self,
        worker: WorkerContext,
        hello: Hello,
        ledger: CreditLedger,
        dispatcher: DecodeDispatcher | None,
    ) -> None:
        self.ledger = ledger
        self._worker = worker
        self._hello = hello
        self._dispatcher = dispatcher

    @property
    def engine_id(self) -> str:
        return self._hello.engine_id

    @property
    def needs_credit(self) -> bool:
        """True if a prefill needs a credit; handing over KV computes hardly anything."""
        return self._dispatcher is None

    def hello(self) -> Hello:
        return self._hello

    async def generate(
        self, spec: RequestSpec, prefill: PrefillMode
    ) -> AsyncGenerator[Generated, None]:
        """Run a whole request here.  Raises RequestError on a prefill worker and on a router."""
        dispatcher = self._dispatcher
        if dispatcher is None or self._worker.engineless is not None:
            raise RequestError(f"this is a {self._hello.role} worker: it decodes nothing")
        with (
            self._worker.request(),
            self._worker.traces.of(spec.request_id, role=self._hello.role) as trace,
        ):
            if not spec.output:  # one that has begun was admitted where it began
                dispatcher.admit([spec])
            async with aclosing(dispatcher.run(spec, prefill)) as tokens:
                async for generated in tokens:
                    has_new_events = (
                        generated.prefill is not None or generated.token.finish_reason is not None
                    )
                    yield replace(generated, notes=trace.take()) if has_new_events else generated

    async def ask(self, path: str, body: bytes) -> bytes:
        """The answer of this worker's engine.  Raises RequestError, PeerError."""
        if self._worker.front_end is None or path not in (*PATHS, EMBEDDINGS):
            raise RequestError(f"this worker's engine is not asked for {path} here", status=404)
        try:
            return await self._worker.front_end.ask(path, body)
        except HttpFailedError as e:
            raise PeerError(str(e)) from e

    async def prefill(
        self, peer: str, spec: RequestSpec, target: TransferTarget
    ) -> AsyncGenerator[Token | PrefillDone, None]:
        """The first token, then PrefillDone unless that token ended the request.

        The engine writes the KV to `target` meanwhile.  Raises RequestError when it cannot be done,
        on a router, and on a decode worker that would have to compute it.
        """
        worker = self._worker
        if worker.engineless is not None:
            raise RequestError(
                f"this is a {self._hello.role} worker: it prefills for no peer ({peer})"
            )
        if not self.needs_credit:
            self._check_held(spec)
        clock = asyncio.get_running_loop().time
        arrival = clock()
        with (
            worker.traces.of(spec.request_id, role=self._hello.role, decode_worker=peer),
            worker.request(),
        ):
            handle = worker.engines.open(
                spec.request_id, lambda: worker.hashes(spec), spec.num_tokens
            )
            try:
                handle.send(Prefill(spec, target))
                while True:
                    reply = _checked(await handle.outputs.get(), target)
                    self._observe(spec, reply, clock() - arrival)
                    if isinstance(reply, PrefillDone):
                        trace_migration(reply)
                    else:
                        trace_prefill(reply, "remote")
                    yield reply
                    if isinstance(reply, PrefillDone) or reply.finish_reason is not None:
                        return
            finally:
                handle.close()

    def _observe(self, spec: RequestSpec, reply: Token | PrefillDone, seconds: float) -> None:
        if isinstance(reply, PrefillDone):
            self._worker.note_transfer(reply)
            phases: dict[str, float | None] = {"transfer": reply.seconds}
        else:
            phases = {
                "queue": reply.queue_seconds,
                "prefill": reply.prefill_seconds,
                "first_token": seconds,
            }
        for phase, took in phases.items():
            if took is not None and not spec.verify_transfer:  # that is no client's
                self._worker.metrics.remote_prefill_phase_seconds.labels(phase).observe(took)

    async def receive_prefix(
        self,
        spec: RequestSpec,
        given: Callable[[], Awaitable[tuple[Token, PrefillDone]]],
    ) -> AsyncGenerator[TransferTarget, None]:
        """The blocks that a prefix is to be written to; none if there is no room for it now.

        The engine receives it as for a request of its own, and keeps it in its prefix cache, where
        the prefill that follows finds it.
        given: waits until it is written.
        Raises RequestError on any but a prefill worker, and after PUSH_SECONDS.
        """
        worker = self._worker
        if not self.needs_credit:
            raise RequestError(f"this is a {self._hello.role} worker: it takes no prefix")
        with worker.request():
            handle = worker.engines.open(
                spec.request_id, lambda: worker.hashes(spec), spec.num_tokens
            )
            try:
                blocks = await handle.receive(spec)
                if isinstance(blocks, ReceiveRefused):
                    return
                yield handle.target(blocks)
                first, done = await _in_time(given())
                handle.send(ReceiveDone(spec.request_id, blocks.epoch, first, done.checksum))
                await handle.outputs.token()
                worker.metrics.kv_prefixes_taken.inc()
            finally:
                handle.close()

    def _check_held(self, spec: RequestSpec) -> None:
        num_tokens = spec.num_tokens
        held = (
            self._worker.engines.matched_blocks(self._worker.hashes(spec)) * self._worker.block_size
        )
        if not is_held(held, num_tokens):
            message = (
                f"this worker has the KV of {held} of {num_tokens} tokens: compute them elsewhere"
            )
            raise RequestError(message, status=503, code="kv_gone")

    def watch(self) -> AsyncGenerator[Report, None]:
        return self._worker.reports()


def _checked(output: object, target: TransferTarget) -> Token | PrefillDone:
    if isinstance(output, PrefillFailed):
        message = f"KV transfer to {target.addresses[0]} failed: {output.reason}"
        raise RequestError(message, status=503, code="transfer_failed")
    if not isinstance(output, Token | PrefillDone):
        raise RequestError(f"the engine answered {type(output).__name__} to Prefill", status=500)
    return output


async def _in_time(given: Awaitable[tuple[Token, PrefillDone]]) -> tuple[Token, PrefillDone]:
    try:
        async with asyncio.timeout(PUSH_SECONDS) as limit:
            return await given
    except TimeoutError as e:
        late = f"the giver has not written the prefix within {PUSH_SECONDS:g} s"
        message = late if limit.expired() else f"the giver timed out: {e or 'it says no more'}"
        raise RequestError(message, status=503, code="prefix_not_given") from e
