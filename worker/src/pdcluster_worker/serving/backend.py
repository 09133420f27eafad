"""A worker or a router as its HTTP side sees it, also before it serves and when it is dead."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.messages.overview import ClusterOverview
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.routing.decode_choice import NO_HINTS, RouteHints
from pdcluster_worker.routing.qos.load_shedding import aged
from pdcluster_worker.serving.engines.adapter_calls import AdapterCalls
from pdcluster_worker.serving.engines.engines import Engines
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.ingress.wait_queue import WaitQueue
from pdcluster_worker.serving.worker_runtime import NO_FRONT_END, WorkerRuntime
from pdcluster_worker.streams import Reader

MAX_PAUSE_SECONDS = 10  # of a held request between two tries
MAX_LOST = 3  # tries that may end with their workers: a request may be what ends them
_LOST = frozenset({"no_decode_worker", "decode_worker_lost", "engine_stalled", "draining"})


class ServingBackend:
    """Base of both: a runtime from `serve` on, and its ingress."""

    _kind = "worker"

    def __init__(
        self,
        model_name: str,
        max_model_len: int = 0,
        vocab_size: int = 0,
        adapters: Sequence[str] = (),
    ) -> None:
        self.model_name = model_name
        self._declared = dict.fromkeys(adapters, "")
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.length_note = ""
        self.device: DeviceFacts | None = None
        self.scheduler: str | None = None
        self._runtime: WorkerRuntime | None = None

    def serve(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime

    @property
    def adapters(self) -> Mapping[str, str]:
        """Those of `model.adapters`, and those that workers have loaded later, with their
        fingerprints: of two with one name this worker's, else those that most workers have.
        """
        runtime = self._runtime
        if runtime is None:
            return self._declared
        found = Counter(each for peer in runtime.decodes() for each in peer.load.adapters.items())
        others = {name: weights for (name, weights), _ in reversed(found.most_common())}
        return {**self._declared, **others, **runtime.worker.adapters}

    def adapter_calls(self) -> AdapterCalls:
        raise NotImplementedError

    def ready(self) -> str | None:
        raise NotImplementedError

    def draining(self) -> bool:
        return self._runtime is not None and self._runtime.worker.state in ("draining", "drained")

    def num_ingresses(self) -> int:
        return 1 if self._runtime is None else self._runtime.num_ingresses()

    def shortfall(self) -> str | None:
        raise NotImplementedError

    def overview(self) -> ClusterOverview:
        """Raises RequestError 503 before this worker serves."""
        if self._runtime is None:
            raise self._not_ready()
        return self._runtime.view.overview(self.ready() or self.shortfall())

    async def ask(self, path: str, body: bytes) -> bytes:
        """POST to the front end of an engine: this worker's, else that of a decode worker.

        Raises RequestError: as the engine refused it, or 503.
        """
        if self._runtime is None:
            raise self._not_ready()
        return await self._runtime.ask(path, body)

    def abort(self, request_id: str) -> None:
        if self._runtime is not None and self._runtime.ingress is not None:
            self._runtime.ingress.abort(request_id)

    def generate(
        self,
        specs: list[RequestSpec],
        prefill: PrefillMode,
        hints: RouteHints = NO_HINTS,
        reader: Reader[Generated] | None = None,
    ) -> AsyncGenerator[Generated, None]:
        return self._ingress().generate(specs, prefill, hints, reader)

    def _ingress(self) -> Ingress:
        if self._runtime is None or self._runtime.ingress is None:
            raise self._not_ready()
        return self._runtime.ingress

    def _not_ready(self) -> RequestError:
        return RequestError(
            f"this {self._kind} is not ready: {self.ready()}",
            status=503,
            code="not_ready",
            retry_after_seconds=1,
        )


class WorkerBackend(ServingBackend):
    """A worker with engines.  waits_for: why it is not ready until it serves.

    may_compile: an engine that stalls is alive until it is given up.
    loads_adapters: while it runs, by model.runtimeAdapters.
    """

    def __init__(
        self,
        model_name: str,
        engines: Engines,
        adapters: Sequence[str] = (),
        *,
        may_compile: bool = False,
        loads_adapters: bool = False,
    ) -> None:
        super().__init__(model_name, adapters=adapters)
        self._loads_adapters = loads_adapters
        self._may_compile = may_compile
        self.waits_for = "the engine is loading the model"
        self._engines = engines

    def engines_are_ready(self) -> None:
        facts = min(
            (engine.facts for engine in self._engines), key=lambda facts: facts.max_model_len
        )
        self.max_model_len = facts.max_model_len
        self.length_note = facts.length_note
        self.vocab_size = facts.vocab_size
        self.device = facts.device
        self.scheduler = facts.scheduler

    def adapter_calls(self) -> AdapterCalls:
        """Raises RequestError: 403 where it is not allowed, 503 while the engine loads."""
        if not self._loads_adapters:
            raise RequestError(
                "adapters are neither loaded nor unloaded here while workers run: set "
                "model.runtimeAdapters of the PDCluster",
                status=403,
                code="runtime_adapters_off",
            )
        if self.is_loading or self._problem() is not None:
            raise self._not_ready()
        return self._engines.first.client.adapters

    def wait(self, what: str) -> None:
        self.waits_for = what

    def ready(self) -> str | None:
        """None when requests may come, else why not."""
        return self._problem() or (
            self.waits_for if self._runtime is None else self._runtime.problem()
        )

    def alive(self) -> str | None:
        """None while engines load or one makes progress, else the reason why none does."""
        return None if self._may_compile and not self.is_lost else self._problem()

    def _problem(self) -> str | None:
        problem = self._engines.problem if len(self._engines) else None
        return (
            problem
            if problem is None or self._engines.is_stalled
            else f"the engine stopped: {problem}"
        )

    def shortfall(self) -> str | None:
        """Engines that do not serve while others do; None when all or none serve."""
        return self._engines.shortfall

    def draining(self) -> bool:
        if self._engines.is_stalled:
            return True
        return super().draining()

    @property
    def is_lost(self) -> bool:
        """True if an engine was given up, or has ended."""
        clients = [engine.client for engine in self._engines]
        return not clients or any(client.is_given_up or client.is_lost for client in clients)

    @property
    def is_loading(self) -> bool:
        return self.device is None


def restart_reason(
    backend: WorkerBackend, clock: Callable[[], float], startup_seconds: float
) -> Callable[[], str | None]:
    """Reason to restart the engine of a worker from now on, where that is another's to do.

    None while the engine loads within its time, serves, or stalls and may recover.
    """
    start = clock()

    def reason() -> str | None:
        if not backend.is_loading:
            return backend.alive()
        waited = clock() - start
        is_late = waited >= startup_seconds
        return f"the engine is not ready after {waited:.0f} s" if is_late else None

    return reason


class RouterBackend(ServingBackend):
    """A router: it has no engine, and serves from its registration on.

    A request that finds no decode worker waits for one as long as the policy says.
    max_model_len, vocab_size: of the model; the lowest of the decode workers' once one is seen.
    """

    _kind = "router"

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        vocab_size: int,
        adapters: Sequence[str] = (),
    ) -> None:
        super().__init__(model_name, max_model_len, vocab_size, adapters)
        self._arrived = asyncio.Event()  # set while a decode worker takes new work
        self._waiting = WaitQueue()

    def serve(self, runtime: WorkerRuntime) -> None:
        super().serve(runtime)
        runtime.worker.metrics.held_requests.set_function(lambda: self._waiting.num_requests)
        runtime.on_peers = self._poll
        self._poll()

    def ready(self) -> str | None:
        """None when requests may come, also without decode workers, which may come back."""
        return "not registered in etcd yet" if self._runtime is None else self._runtime.problem()

    def alive(self) -> str | None:
        """None: it has no engine that could die."""
        return None

    def adapter_calls(self) -> AdapterCalls:
        raise RequestError(
            "a router has no engine to load adapters: send this to each worker that is to have it",
            status=404,
        )

    def shortfall(self) -> str | None:
        """Reason why no decode worker takes requests; None while one does."""
        if self._runtime is None or self._arrived.is_set():
            return None
        return f"no decode worker takes requests: {self._runtime.worker.absence()}"

    def generate(
        self,
        specs: list[RequestSpec],
        prefill: PrefillMode,
        hints: RouteHints = NO_HINTS,
        reader: Reader[Generated] | None = None,
    ) -> AsyncGenerator[Generated, None]:
        """`reader` is given nothing: tokens of peers come from the stream."""
        ingress, runtime = self._ingress(), self._runtime
        if runtime is None or (self._arrived.is_set() and not _wait_seconds(runtime)):
            return ingress.generate(specs, prefill, hints)
        return self._later(runtime, ingress, specs, prefill, hints)

    async def ask(self, path: str, body: bytes) -> bytes:
        """Ask workers that drain too, which still hold the tokens of open answers."""
        try:
            return await super().ask(path, body)
        except RequestError as e:
            if e.code != NO_FRONT_END or self._runtime is None or self._arrived.is_set():
                raise
        await self._wait(self._runtime, 0, _wait_seconds(self._runtime))
        return await super().ask(path, body)

    def _poll(self) -> None:
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
        """Wait for a decode worker first, and again while those that come do not take it.

        Raises RequestError when none does in time.
        """
        clock = asyncio.get_running_loop().time
        start, num_tokens = clock(), sum(spec.num_tokens for spec in specs)
        until = start + _wait_seconds(runtime)
        held = _HeldRequest()
        while True:
            if held.error is not None or not self._arrived.is_set():
                await self._wait(runtime, num_tokens, until - clock(), held.error)
                held.has_waited = True
            waited = clock() - start
            has_begun = False
            try:
                async with aclosing(
                    ingress.generate([aged(spec, waited) for spec in specs], prefill, hints)
                ) as tokens:
                    async for generated in tokens:
                        has_begun = True
                        yield generated
                return
            except RequestError as e:
                if has_begun or runtime.worker.state != "ready" or not held.goes_on(e):
                    raise

    async def _wait(
        self,
        runtime: WorkerRuntime,
        num_tokens: int,
        seconds: float,
        error: RequestError | None = None,
    ) -> None:
        """error: of the last try, which no other follows at once"""
        worker = runtime.worker
        if seconds <= 0.0:
            raise error or worker.refusal()
        try:
            with self._waiting.join(worker, num_tokens, seconds):
                async with asyncio.timeout(seconds):
                    if error is not None:
                        await asyncio.sleep(_pause(error))
                    await self._arrived.wait()
        except TimeoutError as e:
            raise error or worker.refusal() from e


def _wait_seconds(runtime: WorkerRuntime) -> float:
    return runtime.worker.policy.admission.worker_wait_seconds


def _pause(error: RequestError) -> float:
    """Seconds until the next try, not those of all requests and routers at once."""
    hint = error.retry_after_seconds or 1
    return min(hint, MAX_PAUSE_SECONDS) * random.uniform(0.5, 1.0)


@dataclass(slots=True)
class _HeldRequest:
    """A request at a router before its first token.  error: of its last try"""

    error: RequestError | None = None
    has_waited: bool = False
    num_lost: int = 0

    def goes_on(self, error: RequestError) -> bool:
        """Return whether it is held on after a try that failed.

        One that never waited is refused by a full worker at once, so that its client can back off.
        """
        self.error = error
        if error.code in ("queue_full", "duplicate_request"):  # the last try may still run there
            return self.has_waited
        self.num_lost += error.code in _LOST
        return error.code in _LOST and self.num_lost <= MAX_LOST
