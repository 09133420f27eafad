"""One request on its decode worker: decide where to prefill, then stream the engine's tokens.

Guarantees: closing the iterator ends both legs; in `auto` a missing or failing
prefill worker means local prefill, never an error; a token that was shown is
kept whatever fails after it.  The remote leg is `dispatch.decode.remote`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial

from pdcluster_worker.dispatch.decode.offloading import Offloading, Pace
from pdcluster_worker.dispatch.decode.quality import Quality, Terms
from pdcluster_worker.dispatch.decode.remote import RemotePrefill
from pdcluster_worker.dispatch.engines.client import RequestOutputs, ShortOfBlocksError
from pdcluster_worker.dispatch.engines.engines import Place
from pdcluster_worker.dispatch.estimation import Followed
from pdcluster_worker.dispatch.worker import Worker
from pdcluster_worker.errors import RequestError
from pdcluster_worker.journeys.journey import note
from pdcluster_worker.journeys.lifetime import note_first_token, note_last_token
from pdcluster_worker.messages.engine import Submit
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec, Token
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.moving import has_room, is_short_of_blocks


@dataclass(slots=True)
class _Request:
    """One request at its engine.  has_begun: it has its first token; has_ended: its last one."""

    spec: RequestSpec
    prefill: PrefillMode
    place: Place
    pace: Pace
    followed: Followed
    has_begun: bool = False
    has_ended: bool = False


class DecodeDispatcher:
    """Runs requests on this worker, for our own HTTP and for the gRPC `Generate` of a peer's.

    holder: the connected decode worker of a pod, which may drain; None = there is none.
    """

    def __init__(
        self,
        worker: Worker,
        remote: RemotePrefill,
        prefills: Callable[[], list[Peer]],
        decodes: Callable[[], list[Peer]],
        holder: Callable[[str], Peer | None] = lambda _: None,
    ) -> None:
        self._worker = worker
        self._remote = remote
        self._decodes = decodes
        self._holder = holder
        self._offloading = Offloading(worker, prefills, decodes)
        self._quality = Quality(worker)
        self._num_decoding = 0  # past their first token

    @property
    def num_requests(self) -> int:
        """Requests on this worker now."""
        return self._quality.num_waiting + self._num_decoding

    def admit(self, specs: Sequence[RequestSpec]) -> None:
        """Raise RequestError when a prompt with all its choices is not taken now; see
        `quality.Quality.admit`.
        """
        self._quality.admit(specs)

    async def run(self, spec: RequestSpec, prefill: PrefillMode) -> AsyncGenerator[Generated, None]:
        """Yield the request's tokens.

        Raises RequestError.  The caller asks `admit` first, once for all choices of a prompt.
        """
        terms: Terms | None = self._quality.terms(spec, prefill)
        while terms is not None:
            with self._quality.turn(terms) as turn, self._running(terms) as request:
                async with aclosing(self._first_tokens(request)) as firsts:
                    generated = await self._quality.first(turn, firsts)
                    while generated is not None:
                        yield self._noted(request, generated)
                        generated = await anext(firsts, None)
                while turn.has_started and not request.has_ended:
                    yield self._noted(request, Generated(await request.place.mailbox.token()))
            terms = None if turn.has_started else self._quality.demoted(terms)

    @contextmanager
    def _running(self, terms: Terms) -> Iterator[_Request]:
        """Give it a place at an engine, until it ends or is closed."""
        spec = terms.spec
        with self._worker.estimation.following(spec) as followed:
            place = self._worker.engines.open(spec.request_id, lambda: self._worker.hashes(spec))
            place.mailbox.on_preempted = partial(self._short_of_blocks, place.mailbox, spec)
            pace = self._offloading.pace(spec.request_id, len(spec.prompt) + len(spec.output))
            request = _Request(spec, terms.prefill, place, pace, followed)
            try:
                yield request
            finally:
                if request.has_begun:
                    self._num_decoding -= 1
                pace.ended()
                place.close()

    def _noted(self, request: _Request, generated: Generated) -> Generated:
        """Count a token that goes out."""
        if request.has_begun:
            self._quality.token()
        else:
            request.has_begun = True
            note_first_token(generated)
            self._num_decoding += 1
        token = generated.token
        request.pace.token(generated)
        if token.finish_reason is not None:
            request.has_ended = True
            note_last_token(token)
        request.followed.token(token)
        return generated

    def _short_of_blocks(self, mailbox: RequestOutputs, spec: RequestSpec) -> RequestError | None:
        """Error that ends a request that was just preempted; None = it waits for blocks."""
        if not is_short_of_blocks(self._worker.policy.moving, mailbox.num_preemptions):
            return None
        num_tokens = len(spec.prompt) + len(spec.output) + mailbox.num_tokens
        needed = self._worker.num_blocks(num_tokens)
        if not any(has_room(peer.load.free_blocks, needed) for peer in self._decodes()):
            return None
        return ShortOfBlocksError(mailbox.num_preemptions)

    async def _first_tokens(self, request: _Request) -> AsyncGenerator[Generated, None]:
        """The first token, and after a remote prefill the first that was decoded here."""
        place, spec, prefill, pace = request.place, request.spec, request.prefill, request.pace
        started = False
        holder = self._holder(spec.kv_holder)
        hashes = [] if prefill == "local" and holder is None else self._worker.hashes(spec)
        if holder is not None and self._offloading.reads_kv(place, spec, hashes, holder):
            pace.side = None
            async with aclosing(self._remote.read(place, spec, holder)) as first:
                async for generated in first:
                    started = True
                    yield generated
                    if generated.token.finish_reason is not None:
                        return
        elif prefill == "remote" or (
            prefill == "auto"
            and self._offloading.goes(place, spec, hashes, self._num_decoding, pace)
        ):
            pace.sent("remote")
            async with aclosing(
                self._remote.first_token(place, spec, hashes, forced=prefill == "remote")
            ) as first:
                async for generated in first:
                    started = True
                    yield generated
                    if generated.token.finish_reason is not None:
                        return
        else:
            pace.sent("local")
            place.send(Submit(spec))
        if started:
            yield Generated(await self._first_step(place.mailbox))
        else:
            yield Generated(await place.mailbox.token(), "local")

    async def _first_step(self, mailbox: RequestOutputs) -> Token:
        """The first token decoded here after a remote prefill, timed from the
        hand-over of its KV.
        """
        clock = asyncio.get_running_loop().time
        start = clock()
        token = await mailbox.token()
        self._worker.metrics.ttft_phase_seconds.labels("first_step").observe(clock() - start)
        note("first_step", seconds=clock() - start)
        return token
