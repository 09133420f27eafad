"""Where a request enters: the decode worker with the fewest requests runs all its choices, one hop away at most.

Losing that worker before the first token means another try here; after it, a
clean error, for the client must never see two workers' versions of one answer.
What the chosen worker does is `dispatch.decoding`'s business.
"""

import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from pdcluster_worker.dispatch.choices import Choices
from pdcluster_worker.dispatch.decoding import DecodeDispatcher
from pdcluster_worker.dispatch.worker import Worker
from pdcluster_worker.engine.messages import RequestSpec
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.peers.types import Generated, PrefillMode
from pdcluster_worker.routing.score import DecodeCandidate, choose_decode

logger = logging.getLogger(__name__)

_SELF = ""
_UNAVAILABLE = 503  # draining, full or its engine dead: another worker may well serve the request


class Ingress:
    """Takes requests from HTTP; one per decode worker."""

    def __init__(self, worker: Worker, here: DecodeDispatcher, decodes: Callable[[], list[Peer]]) -> None:
        self._worker = worker
        self._here = here
        self._decodes = decodes
        self._relayed: Counter[str] = Counter()
        self._choices: dict[str, Choices] = {}
        self._tie = random.Random()

    async def generate(self, specs: list[RequestSpec], prefill: PrefillMode) -> AsyncGenerator[Generated, None]:
        """All choices of one prompt, as they come.  Closing the iterator ends every leg.  Raises RequestError.

        The first choice may be prefilled remotely; the others start from its
        cached prompt, on the same worker.
        """
        with self._worker.request():
            peer = self._choose()
            if peer is None:
                self._here.admit()
            others: PrefillMode = "local" if prefill == "remote" else prefill
            streams = {spec.request_id: self._at(peer, spec, others if index else prefill) for index, spec in enumerate(specs)}
            choices = Choices(streams)
            self._choices.update(dict.fromkeys(streams, choices))
            try:
                async with aclosing(choices.tokens()) as tokens:
                    async for generated in tokens:
                        yield generated
            finally:
                for request_id in streams:
                    del self._choices[request_id]

    def abort(self, request_id: str) -> None:
        """End one choice early; unknown and ended ids are a no-op."""
        if (choices := self._choices.get(request_id)) is not None:
            choices.abort(request_id)

    def _choose(self) -> Peer | None:
        peers = {peer.key: peer for peer in self._decodes()}
        if not peers:
            return None
        candidates = [DecodeCandidate(key, self._requests_at(peer), is_self=False) for key, peer in peers.items()]
        candidates.append(DecodeCandidate(_SELF, self._here.num_requests, is_self=True))
        return peers.get(choose_decode(candidates, self._tie))

    def _requests_at(self, peer: Peer) -> int:
        load = peer.load
        # A report is up to a second old; what we sent there since is certain.
        return max(load.num_running + load.num_waiting + load.credit_queue_requests, self._relayed[peer.key])

    def _at(self, peer: Peer | None, spec: RequestSpec, prefill: PrefillMode) -> AsyncGenerator[Generated, None]:
        return self._here.run(spec, prefill) if peer is None else self._relay(peer, spec, prefill)

    async def _relay(self, peer: Peer, spec: RequestSpec, prefill: PrefillMode) -> AsyncGenerator[Generated, None]:
        """The peer admits it, and this worker does not again when it takes over."""
        started = False
        self._relayed[peer.key] += 1
        try:
            async with aclosing(peer.generate(spec, prefill)) as tokens:
                async for generated in tokens:
                    started = True
                    yield generated
            return
        except (PeerError, RequestError) as e:
            if isinstance(e, RequestError) and e.status != _UNAVAILABLE:
                raise  # the request's own fault
            logger.warning("decode peer failed request=%s peer=%s started=%s reason=%s", spec.request_id, peer.key, started, e)
            if started:
                raise RequestError(f"the decode worker of this request was lost: {e}", status=503, code="decode_worker_lost") from e
        finally:
            self._relayed[peer.key] -= 1
        async with aclosing(self._here.run(spec, prefill)) as tokens:
            async for generated in tokens:
                yield generated
