"""Requests that the engine has accepted, until they end and no step writes their blocks any more.

Guarantees that an id and an epoch belong to one live request.  It changes no request
and frees no block; a request that can never run is answered and not kept.
"""

import logging
from collections.abc import Callable, Iterator
from itertools import chain

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.sending import Sender
from pdcluster_worker.engine.validation import refusal
from pdcluster_worker.messages.engine import RequestFailed
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.requests import RequestSpec, TransferTarget

logger = logging.getLogger(__name__)


class LiveRequests:
    """One per engine.  leaving: requests that have ended while a step under way writes their
    blocks.
    """

    def __init__(
        self, settings: EngineSettings, sender: Sender, clock: Callable[[], float]
    ) -> None:
        self.leaving: set[EngineRequest] = set()
        self._requests: dict[str, EngineRequest] = {}
        self._settings = settings
        self._sender = sender
        self._clock = clock

    def __getitem__(self, request_id: str) -> EngineRequest:
        return self._requests[request_id]

    def get(self, request_id: str) -> EngineRequest | None:
        """The request of this id; None when none that lives has it."""
        return self._requests.get(request_id)

    def accept(
        self, spec: RequestSpec, num_more: int, target: TransferTarget | None = None
    ) -> EngineRequest | RequestFailed | None:
        """A live request from its wire form; None for a repeated id, and the answer to one that can
        never run.
        """
        if spec.request_id in self._requests:
            logger.warning("ignored a repeated request id request=%s", spec.request_id)
            return None
        request = EngineRequest.from_spec(spec, self._clock(), target)
        reason = refusal(request, self._settings, num_more)
        if reason is None and target is not None and target.epoch in self._sender:
            reason = "target.epoch is in use by another request: every transfer needs a fresh one"
        if reason is None and target is not None and not target.block_ids:
            reason = "target names no blocks: this engine writes KV, and keeps none to be fetched"
        if reason is not None:
            return RequestFailed(request.request_id, reason, is_refusal=True)
        self._requests[request.request_id] = request
        return request

    def forget(self, request: EngineRequest) -> None:
        """End a request: its id is free."""
        del self._requests[request.request_id]

    def held_blocks(self) -> Iterator[int]:
        """Blocks held by requests and sends, once for each hold."""
        tables = [request.block_table for request in chain(self._requests.values(), self.leaving)]
        return chain(self._sender.held(), chain.from_iterable(tables))
