"""The worker as its HTTP side sees it, from before its engine has loaded until after
it has died.
"""

from collections.abc import AsyncGenerator, Callable

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.messages.verification import VerificationResult
from pdcluster_worker.routing.hints import NO_HINTS, RouteHints
from pdcluster_worker.serving.engines.engines import Engines
from pdcluster_worker.serving.engines.vllm_child import NEVER_READY_SECONDS
from pdcluster_worker.serving.worker_runtime import WorkerRuntime
from pdcluster_worker.streams import Reader


class WorkerBackend:
    """Implements `server.generation.backend.Backend`.  waits_for: why it is not ready until it
    serves
    """

    def __init__(self, model_name: str, engines: Engines) -> None:
        self.model_name = model_name
        self.max_model_len = 0
        self.vocab_size = 0
        self.length_note = ""
        self.device: DeviceFacts | None = None
        self.scheduler: str | None = None
        self.waits_for = "the engine is loading the model"
        self._engines = engines
        self._runtime: WorkerRuntime | None = None

    def engines_are_ready(self) -> None:
        """Take their device and limits: the shortest length of any."""
        facts = min(
            (engine.facts for engine in self._engines), key=lambda facts: facts.max_model_len
        )
        self.max_model_len = facts.max_model_len
        self.length_note = facts.length_note
        self.vocab_size = facts.vocab_size
        self.device = facts.device
        self.scheduler = facts.scheduler

    def wait(self, what: str) -> None:
        """Say in the place of loading what its engine waits for."""
        self.waits_for = what

    def serve(self, runtime: WorkerRuntime) -> None:
        """Take requests from now on."""
        self._runtime = runtime

    def ready(self) -> str | None:
        """None when requests may come, else why not."""
        return self.alive() or (
            self.waits_for if self._runtime is None else self._runtime.problem()
        )

    def alive(self) -> str | None:
        """None while engines load or one makes progress, else the reason why none does."""
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
        """True if a client should send its next request to another worker."""
        if self._engines.is_stalled:
            return True
        return self._runtime is not None and self._runtime.worker.state in ("draining", "drained")

    @property
    def is_loading(self) -> bool:
        """True until its engines are ready."""
        return self.device is None

    def generate(
        self, specs: list[RequestSpec], prefill: PrefillMode, hints: RouteHints = NO_HINTS
    ) -> AsyncGenerator[Generated, None]:
        """See `serving.ingress.ingress.Ingress.generate`."""
        if self._runtime is None or self._runtime.ingress is None:
            raise self._not_ready()
        return self._runtime.ingress.generate(specs, prefill, hints)

    async def verify(self, pool: str, even_if_busy: bool) -> VerificationResult:
        """See `serving.decode.verification.TransferVerification.run`."""
        if self._runtime is None or self._runtime.verification is None:
            raise self._not_ready()
        return await self._runtime.verification.run(pool, even_if_busy=even_if_busy)

    def _not_ready(self) -> RequestError:
        return RequestError(
            f"this worker is not ready: {self.ready()}",
            status=503,
            code="not_ready",
            retry_after_seconds=1,
        )

    def num_ingresses(self) -> int:
        """See `serving.worker_runtime.Node.num_ingresses`; 1 before it is known."""
        return 1 if self._runtime is None else self._runtime.num_ingresses()

    def abort(self, request_id: str) -> None:
        """End one choice early."""
        if self._runtime is not None and self._runtime.ingress is not None:
            self._runtime.ingress.abort(request_id)

    def follow(self, request_id: str, reader: Reader[Generated]) -> None:
        """Hand on the later tokens of a lone choice."""
        if self._runtime is not None and self._runtime.ingress is not None:
            self._runtime.ingress.follow(request_id, reader)


class RestartReason:
    """Reason to restart the engine of a worker, where that is another's to do."""

    def __init__(self, backend: WorkerBackend, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._clock = clock
        self._since = clock()

    def reason(self) -> str | None:
        """None while the engine loads within its time, or serves."""
        backend = self._backend
        if not backend.is_loading:
            return backend.alive()
        waited = self._clock() - self._since
        if waited < NEVER_READY_SECONDS:
            return None
        return f"the engine is not ready after {waited:.0f} s"
