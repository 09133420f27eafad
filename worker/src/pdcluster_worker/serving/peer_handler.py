"""Serve the calls of peers: implements `peers.service.WorkerHandler` for each role."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from msgspec.structs import replace

from pdcluster_worker.config.routing import CreditPolicy
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.peers import Generated, Hello, PrefillMode, Report
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.routing.migration import is_held
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.prefill_dispatcher import PrefillDispatcher
from pdcluster_worker.serving.prefix_receive import receive_prefix
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing.lifecycle_events import trace_prefill


def credit_limit(policy: CreditPolicy, max_batched_tokens: int) -> int:
    """Tokens that a prefill worker has granted or in hand at most."""
    return max(1, int(policy.batches_ahead * max_batched_tokens))


class PeerRequestHandler:
    """One per worker; `work` is what its role runs."""

    def __init__(
        self,
        worker: WorkerContext,
        hello: Hello,
        ledger: CreditLedger,
        work: DecodeDispatcher | PrefillDispatcher,
    ) -> None:
        self._worker = worker
        self._hello = hello
        self._ledger = ledger
        self._work = work
        # A decode worker hands over the KV of requests that leave it.
        self._prefills = work if isinstance(work, PrefillDispatcher) else PrefillDispatcher(worker)

    @property
    def engine_id(self) -> str:
        """Identity of this start of the engine."""
        return self._hello.engine_id

    @property
    def ledger(self) -> CreditLedger:
        """Credits of this worker's engine."""
        return self._ledger

    @property
    def needs_credit(self) -> bool:
        """True if a prefill needs a credit; handing over KV computes hardly anything and needs
        none.
        """
        return isinstance(self._work, PrefillDispatcher)

    def hello(self) -> Hello:
        """This side of a handshake."""
        return self._hello

    async def generate(
        self, spec: RequestSpec, prefill: PrefillMode
    ) -> AsyncGenerator[Generated, None]:
        """Run a whole request here.  Raises RequestError on a prefill worker and on a router."""
        if not isinstance(self._work, DecodeDispatcher) or self._worker.engineless is not None:
            raise RequestError(f"this is a {self._hello.role} worker: it decodes nothing")
        with (
            self._worker.request(),
            self._worker.traces.of(spec.request_id, role=self._hello.role) as trace,
        ):
            if not spec.output:  # one that has begun was admitted where it began
                self._work.admit([spec])
            async with aclosing(self._work.run(spec, prefill)) as tokens:
                async for generated in tokens:
                    has_new_events = (
                        generated.prefill is not None or generated.token.finish_reason is not None
                    )
                    yield replace(generated, notes=trace.take()) if has_new_events else generated

    async def prefill(
        self, peer: str, spec: RequestSpec, target: TransferTarget
    ) -> AsyncGenerator[Token | PrefillDone, None]:
        """Prefill for a decode engine.

        Raises RequestError on a router, and on a decode worker that would have to compute it.
        """
        if self._worker.engineless is not None:
            raise RequestError(
                f"this is a {self._hello.role} worker: it prefills for no peer ({peer})"
            )
        if not self.needs_credit:
            self._check_held(spec)
        with self._worker.traces.of(spec.request_id, role=self._hello.role, decode_worker=peer):
            async with aclosing(self._prefills.prefill(spec, target)) as replies:
                async for reply in replies:
                    trace_prefill(reply)
                    yield reply

    async def receive_prefix(
        self,
        spec: RequestSpec,
        given: Callable[[], Awaitable[tuple[Token, PrefillDone]]],
    ) -> AsyncGenerator[TransferTarget, None]:
        """Blocks for the KV of a prefix.  Raises RequestError on any but a prefill worker."""
        if not self.needs_credit:
            raise RequestError(f"this is a {self._hello.role} worker: it takes no prefix")
        async with aclosing(receive_prefix(self._worker, spec, given)) as targets:
            async for target in targets:
                yield target

    def _check_held(self, spec: RequestSpec) -> None:
        num_tokens = len(spec.prompt) + len(spec.output)
        held = (
            self._worker.engines.matched_blocks(self._worker.hashes(spec)) * self._worker.block_size
        )
        if not is_held(held, num_tokens):
            message = (
                f"this worker has the KV of {held} of {num_tokens} tokens: compute them elsewhere"
            )
            raise RequestError(message, status=503, code="kv_gone")

    def watch(self) -> AsyncGenerator[Report, None]:
        """Load and prefix cache, until closed."""
        return self._worker.reports()
