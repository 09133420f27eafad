"""What the HTTP side sees of this worker, from before its engine has loaded until after it has died."""

from collections.abc import AsyncGenerator

from pdcluster_worker.dispatch.engine_client import EngineClient
from pdcluster_worker.dispatch.node import Node
from pdcluster_worker.engine.messages import Device, EngineReady, RequestSpec
from pdcluster_worker.errors import RequestError
from pdcluster_worker.peers.types import Generated, PrefillMode


class WorkerBackend:
    """Implements `server.backend.Backend`.  waits_for: why it is not ready until it serves"""

    def __init__(self, model_name: str, engine: EngineClient) -> None:
        self.model_name = model_name
        self.max_model_len = 0
        self.vocab_size = 0
        self.length_note = ""
        self.device: Device | None = None
        self.waits_for = "the engine is loading the model"
        self._engine = engine
        self._node: Node | None = None

    def engine_is_ready(self, facts: EngineReady) -> None:
        """Take the engine's device and limits; a request must also fit into its blocks, with one to spare for a peer's hand-over."""
        self.max_model_len = min(facts.max_model_len, (facts.num_blocks - 1) * facts.geometry.block_size)
        self.vocab_size = facts.vocab_size
        self.length_note = facts.length_note
        self.device = facts.device

    def serve(self, node: Node) -> None:
        """Take requests from now on."""
        self._node = node

    def ready(self) -> str | None:
        """None when requests may come, else why not."""
        return self.alive() or (self.waits_for if self._node is None else self._node.problem())

    def alive(self) -> str | None:
        """None while the engine loads or gets on, else why it does not."""
        return self._engine.stalled if self._engine.died is None else f"the engine stopped: {self._engine.died}"

    def draining(self) -> bool:
        """Whether the next request of a client should go to another worker."""
        if self._engine.stalled is not None:
            return True
        return self._node is not None and self._node.worker.state in ("draining", "drained")

    def generate(self, specs: list[RequestSpec], prefill: PrefillMode) -> AsyncGenerator[Generated, None]:
        """See `dispatch.ingress.Ingress.generate`."""
        if self._node is None or self._node.ingress is None:
            raise RequestError(f"this worker is not ready: {self.ready()}", status=503, code="not_ready", retry_after_seconds=1)
        return self._node.ingress.generate(specs, prefill)

    def abort(self, request_id: str) -> None:
        """End one choice early."""
        if self._node is not None and self._node.ingress is not None:
            self._node.ingress.abort(request_id)
