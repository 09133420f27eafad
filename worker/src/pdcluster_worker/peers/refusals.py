"""Pairs that the handshake refused, from either side: logged and counted once, remembered."""

import logging

from pdcluster_worker.messages.peers import Hello
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.geometry import mismatch, reason_label

logger = logging.getLogger(__name__)

_REMEMBERED = 1024
"""Engine ids; far above the workers of a cell, so that only restarted ones are ever forgotten."""


class Refusals:
    """One per worker, shared by its gRPC service and its clients."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._reasons: dict[str, str] = {}

    def check(self, mine: Hello, theirs: Hello) -> str | None:
        """Returns the reason of a refusal, or None."""
        known = self._reasons.get(theirs.engine_id)
        if known is not None:
            return known
        reason = mismatch(mine.facts, theirs.facts)
        if reason is not None:
            self._remember(theirs, reason, reason_label(mine.facts, theirs.facts) or "unknown")
        return reason

    def reason(self, engine_id: str) -> str | None:
        return self._reasons.get(engine_id)

    def _remember(self, theirs: Hello, reason: str, label: str) -> None:
        self._reasons[theirs.engine_id] = reason
        if len(self._reasons) > _REMEMBERED:
            del self._reasons[next(iter(self._reasons))]
        self._metrics.peer_refused.labels(label).inc()
        logger.warning(
            "refused peer engine=%s role=%s reason=%s", theirs.engine_id, theirs.role, reason
        )
