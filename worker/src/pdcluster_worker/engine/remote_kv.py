"""Requests whose KV a peer writes: from its last word about them to their place in the queue.

A request whose blocks have not all arrived whole is prefilled here, and the client
gets no token twice.  `receiving` owns the blocks until the fence.
"""

import logging
from collections.abc import Callable

from pdcluster_worker.engine.grammar_queue import GrammarQueue
from pdcluster_worker.engine.ports import Fenced
from pdcluster_worker.engine.receiving import Receiver
from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.messages.engine import Received, ReceiveDone, ReceiveFailed
from pdcluster_worker.messages.requests import Token

logger = logging.getLogger(__name__)


class RemoteKV:
    """All requests of an engine that wait for a peer.  end: forgets a request."""

    def __init__(
        self,
        receiver: Receiver,
        compiling: GrammarQueue,
        clock: Callable[[], float],
        end: Callable[[EngineRequest], None],
    ) -> None:
        self._receiver = receiver
        self._compiling = compiling
        self._clock = clock
        self._end = end

    def done(self, message: ReceiveDone) -> None:
        """The peer has written everything, or the request has ended at its first token."""
        request = self._receiver.expects(message.request_id, message.epoch)
        if request is None:
            logger.info("stale ReceiveDone request=%s", message.request_id)
        elif message.first.finish_reason is not None:
            self._end(request)
        else:
            self._receiver.finish(message, self._clock())

    def failed(self, message: ReceiveFailed) -> None:
        """The peer writes no more; what it sampled is kept."""
        request = self._receiver.expects(message.request_id, message.epoch)
        if request is None:
            logger.info("stale ReceiveFailed request=%s", message.request_id)
        elif message.first is not None and message.first.finish_reason is not None:
            self._end(request)
        else:
            self._receiver.give_up(request, self._clock())
            self._prefill_locally(request, message.first)

    def fenced(self, event: Fenced) -> Received | None:
        """Nothing is written any more: the request decodes on, or prefills here.

        Returns what is to be reported of it.
        """
        arrival = self._receiver.fenced(event)
        if arrival is None:
            return None
        if not arrival.usable:
            self._prefill_locally(arrival.request, arrival.done.first)
            return arrival.received
        arrival.request.tokens.append(arrival.done.first.token_id)
        arrival.request.status = Status.WAITING
        self._compiling.queue(arrival.request)
        return arrival.received

    def _prefill_locally(self, request: EngineRequest, first: Token | None) -> None:
        """Go on without the peer's KV.

        The token that the client already has is kept and not said again.
        """
        if first is not None:
            request.tokens.append(first.token_id)
        request.status = Status.PREEMPTED
        self._compiling.queue(request)
