"""A router as its HTTP side sees it: a worker without an engine, which sends every request to a
decode worker.

It serves from its registration on, whether decode workers are there or not:
models stay listed, and a request that finds no decode worker waits for one as
long as the policy says, and is then refused with the reason.  The limits of a
request are those of the decode workers, and the model's own until one is seen.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.routing.admission import full
from pdcluster_worker.routing.hints import NO_HINTS, RouteHints
from pdcluster_worker.routing.qos.load_shedding import retry_after
from pdcluster_worker.routing.qos.slo import aged
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.worker_runtime import WorkerRuntime
from pdcluster_worker.streams import Reader


class RouterBackend:
    """Implements `server.generation.backend.Backend`.

    max_model_len, vocab_size: of the model; the lowest of the decode workers' as soon as one is
                               seen.
    """

    device: DeviceFacts | None = None
    scheduler: str | None = None

    def __init__(self, model_name: str, max_model_len: int, vocab_size: int) -> None:
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.length_note = ""
        self._runtime: WorkerRuntime | None = None
        self._arrived = asyncio.Event()  # set while a decode worker takes new work
        self._num_waiting = 0
        self._waiting_tokens = 0

    def serve(self, runtime: WorkerRuntime) -> None:
        """Take requests from now on."""
        self._runtime = runtime
        runtime.on_peers = self._poll
        self._poll()

    def ready(self) -> str | None:
        """None when requests may come, else why not; without decode workers too, since they may
        come back.
        """
        return "not registered in etcd yet" if self._runtime is None else self._runtime.problem()

    def alive(self) -> str | None:
        """None: it has no engine that could die."""
        return None

    def shortfall(self) -> str | None:
        """Reason why no decode worker takes requests; None while one does."""
        if self._runtime is None or self._arrived.is_set():
            return None
        return f"no decode worker takes requests: {self._runtime.worker.absence()}"

    def draining(self) -> bool:
        """True if a client should send its next request to another router."""
        return self._runtime is not None and self._runtime.worker.state in ("draining", "drained")

    def generate(
        self, specs: list[RequestSpec], prefill: PrefillMode, hints: RouteHints = NO_HINTS
    ) -> AsyncGenerator[Generated, None]:
        """See `serving.ingress.ingress.Ingress.generate`."""
        if self._runtime is None or self._runtime.ingress is None:
            raise RequestError(
                f"this router is not ready: {self.ready()}",
                status=503,
                code="not_ready",
                retry_after_seconds=1,
            )
        if self._arrived.is_set():
            return self._runtime.ingress.generate(specs, prefill, hints)
        return self._later(self._runtime, self._runtime.ingress, specs, prefill, hints)

    def num_ingresses(self) -> int:
        """See `serving.worker_runtime.Node.num_ingresses`; 1 before it is known."""
        return 1 if self._runtime is None else self._runtime.num_ingresses()

    def abort(self, request_id: str) -> None:
        """End one choice early."""
        if self._runtime is not None and self._runtime.ingress is not None:
            self._runtime.ingress.abort(request_id)

    def follow(self, request_id: str, reader: Reader[Generated]) -> None:
        """Nothing: what peers make comes from the stream."""

    def _poll(self) -> None:
        """See which decode workers there are, and what they take."""
        assert self._runtime is not None
        hellos = [peer.hello for peer in self._runtime.decodes() if peer.hello is not None]
        if not hellos:
            self._arrived.clear()
            return
        lengths = [hello.max_model_len for hello in hellos if hello.max_model_len]
        sizes = [hello.vocab_size for hello in hellos if hello.vocab_size]
        self.max_model_len = min(lengths, default=self.max_model_len)
        self.vocab_size = min(sizes, default=self.vocab_size)
        self._arrived.set()

    async def _later(
        self,
        runtime: WorkerRuntime,
        ingress: Ingress,
        specs: list[RequestSpec],
        prefill: PrefillMode,
        hints: RouteHints,
    ) -> AsyncGenerator[Generated, None]:
        """The tokens, as soon as a decode worker takes new work.

        Raises RequestError when none does in time.
        """
        clock = asyncio.get_running_loop().time
        start = clock()
        await self._wait(runtime, sum(len(spec.prompt) + len(spec.output) for spec in specs))
        waited = clock() - start
        async with aclosing(
            ingress.generate([aged(spec, waited) for spec in specs], prefill, hints)
        ) as tokens:
            async for generated in tokens:
                yield generated

    async def _wait(self, runtime: WorkerRuntime, num_tokens: int) -> None:
        worker = runtime.worker
        seconds = worker.policy.admission.worker_wait_seconds
        if not seconds:
            raise worker.refusal()
        if reason := full(
            worker.policy.admission, self._num_waiting, self._waiting_tokens, num_tokens
        ):
            raise RequestError(
                reason, status=503, code="queue_full", retry_after_seconds=retry_after(seconds)
            )
        self._num_waiting += 1
        self._waiting_tokens += num_tokens
        try:
            with worker.request():
                async with asyncio.timeout(seconds):
                    await self._arrived.wait()
        except TimeoutError as e:
            raise worker.refusal() from e
        finally:
            self._num_waiting -= 1
            self._waiting_tokens -= num_tokens
