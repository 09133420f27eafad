"""Where a request enters: the decode worker that `dispatch.choosing` picks runs all its choices, one hop away at most.

Losing that worker before the first token means another try here; after it, a
clean error, for the client must never see two workers' versions of one answer.
A worker that drains, or whose engine stands still, runs nothing that arrives
now: it relays to a peer that stays, and to the next one if that fails.  What the
chosen worker does is `dispatch.decoding`'s business.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from pdcluster_worker.dispatch.choices import Choices, Stream
from pdcluster_worker.dispatch.choosing import HERE, Choosing
from pdcluster_worker.dispatch.decoding import DecodeDispatcher
from pdcluster_worker.dispatch.engine_client import EngineStalledError
from pdcluster_worker.dispatch.worker import Worker
from pdcluster_worker.engine.messages import RequestSpec
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.peers.types import Generated, PrefillMode
from pdcluster_worker.routing.hints import NO_HINTS, RouteHints

logger = logging.getLogger(__name__)

_UNAVAILABLE = 503  # draining, full or its engine dead: another worker may well serve the request


class Ingress:
    """Takes requests from HTTP; one per decode worker.  pod: this worker's name among its peers."""

    def __init__(self, worker: Worker, here: DecodeDispatcher, decodes: Callable[[], list[Peer]], pod: str = HERE) -> None:
        self._worker = worker
        self._here = here
        self._choosing = Choosing(worker, here, decodes, pod)
        self._choices: dict[str, Choices] = {}

    async def generate(
        self, specs: list[RequestSpec], prefill: PrefillMode, hints: RouteHints = NO_HINTS
    ) -> AsyncGenerator[Generated, None]:
        """All choices of one prompt, as they come.  Closing the iterator ends every leg.  Raises RequestError.

        The first choice may be prefilled remotely; the others start from its
        cached prompt, on the same worker.
        """
        with self._choosing.following(specs, hints):
            await self._choosing.room(specs)
            async with aclosing(self._generate(specs, prefill)) as tokens:
                async for generated in tokens:
                    self._choosing.on_token(specs[generated.index].request_id, generated)
                    yield generated

    async def _generate(self, specs: list[RequestSpec], prefill: PrefillMode) -> AsyncGenerator[Generated, None]:
        may_run_here = self._worker.takes_new  # decided once: a drain that begins later lets the request go on
        peer = self._choosing.choose(specs[0], may_run_here)
        if peer is None and not may_run_here:
            raise self._worker.refusal()
        with self._worker.request():
            if peer is None:
                self._here.admit(specs)
            others: PrefillMode = "local" if prefill == "remote" else prefill
            run = self._run_here if peer is None else partial(self._relay, peer, may_run_here)
            streams = {spec.request_id: run(spec, others if index else prefill) for index, spec in enumerate(specs)}
            async with aclosing(self._together(streams)) as tokens:
                async for generated in tokens:
                    yield generated

    def _together(self, streams: dict[str, Stream]) -> Stream:
        """One stream of all choices; of a lone one its own, which costs neither a task nor a queue."""
        if len(streams) == 1:
            (stream,) = streams.values()
            return stream
        return self._abortable(streams)

    async def _abortable(self, streams: dict[str, Stream]) -> Stream:
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
        """End one of several choices early; unknown and ended ids are a no-op, and so is a lone choice."""
        if (choices := self._choices.get(request_id)) is not None:
            choices.abort(request_id)

    async def _run_here(self, spec: RequestSpec, prefill: PrefillMode) -> AsyncGenerator[Generated, None]:
        """On this worker; on another engine of it or at a peer if its engine stalls before the first token."""
        started = False
        try:
            async with aclosing(self._here.run(spec, prefill)) as tokens:
                async for generated in tokens:
                    started = True
                    yield generated
            return
        except EngineStalledError:
            another_serves = self._worker.engines.problem is None
            peer = None if started or another_serves else self._choosing.choose(spec, may_run_here=False)
            if started or (peer is None and not another_serves):
                raise
            goes_to = "another engine" if peer is None else peer.key
            logger.warning("engine stalled before the first token request=%s goes_to=%s", spec.request_id, goes_to)
        once_more = self._here.run(spec, prefill) if peer is None else self._relay(peer, False, spec, prefill)
        async with aclosing(once_more) as tokens:
            async for generated in tokens:
                yield generated

    async def _relay(self, peer: Peer, may_run_here: bool, spec: RequestSpec, prefill: PrefillMode) -> AsyncGenerator[Generated, None]:
        """At a peer, or at another one if that fails; at last here, where it is not admitted again."""
        failed: set[str] = set()
        following: Peer | None = peer
        while following is not None:
            peer, started = following, False
            try:
                async with aclosing(peer.generate(spec, prefill)) as tokens:
                    async for generated in tokens:
                        started = True
                        yield generated
                return
            except (PeerError, RequestError) as e:
                _check_unserved(spec.request_id, peer.key, started, e)
                failed.add(peer.key)
                following = self._after(spec, failed, may_run_here, e)
        async with aclosing(self._here.run(spec, prefill)) as tokens:
            async for generated in tokens:
                yield generated

    def _after(self, spec: RequestSpec, failed: set[str], may_run_here: bool, error: Exception) -> Peer | None:
        """Who takes a request over; None for this worker.  Raises RequestError when nobody may: a peer's own reason, if it gave one."""
        if self._worker.engines.problem is None and (may_run_here or self._worker.takes_new):
            return None
        peer = self._choosing.choose(spec, may_run_here=False, failed=failed)
        if peer is not None:
            return peer
        if isinstance(error, RequestError):
            raise error
        raise self._worker.refusal() from error


def _check_unserved(request_id: str, peer: str, started: bool, error: PeerError | RequestError) -> None:
    """Return if another worker may well serve the request, of which the client has seen nothing; raise RequestError otherwise."""
    if isinstance(error, RequestError) and error.status != _UNAVAILABLE:
        raise error  # the request's own fault
    logger.warning("decode peer failed request=%s peer=%s started=%s reason=%s", request_id, peer, started, error)
    if started:
        raise RequestError(f"the decode worker of this request was lost: {error}", status=503, code="decode_worker_lost") from error
