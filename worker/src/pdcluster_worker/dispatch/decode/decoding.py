"""One request on its decode worker: decide where to prefill, then stream the engine's tokens.

Guarantees: closing the iterator ends both legs; in `auto` a missing or failing
prefill worker means local prefill, never an error; a token that was shown is
kept whatever fails after it.  The remote leg is `dispatch.decode.remote`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from pdcluster_worker.dispatch.decode.offloading import Offloading, Pace
from pdcluster_worker.dispatch.decode.quality import Quality
from pdcluster_worker.dispatch.decode.remote import RemotePrefill
from pdcluster_worker.dispatch.engines.client import RequestOutputs, ShortOfBlocksError
from pdcluster_worker.dispatch.engines.engines import Place
from pdcluster_worker.dispatch.worker import Worker
from pdcluster_worker.errors import RequestError
from pdcluster_worker.journeys.journey import note
from pdcluster_worker.journeys.lifetime import note_first_token, note_last_token
from pdcluster_worker.messages.engine import Submit
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec, Token
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.moving import has_room, is_short_of_blocks


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
        """Raise RequestError when a prompt with all its choices is not taken now; see `quality.Quality.admit`."""
        self._quality.admit(specs)

    def run(self, spec: RequestSpec, prefill: PrefillMode) -> AsyncGenerator[Generated, None]:
        """The request's tokens.  Raises RequestError.  The caller asks `admit` first, once for all choices of a prompt."""
        return self._quality.served(self._run, spec, prefill)

    async def _run(self, spec: RequestSpec, prefill: PrefillMode) -> AsyncGenerator[Generated, None]:
        with self._worker.estimation.following(spec) as followed:
            place = self._worker.engines.open(spec.request_id, lambda: self._worker.hashes(spec))
            place.mailbox.on_preempted = partial(self._short_of_blocks, place.mailbox, spec)
            pace = self._offloading.pace(spec.request_id, len(spec.prompt) + len(spec.output))

            def noted(generated: Generated) -> Generated:
                pace.token(generated)
                if generated.token.finish_reason is not None:
                    note_last_token(generated.token)
                followed.token(generated.token)
                return generated

            started, token = False, None
            try:
                async with aclosing(self._first_tokens(place, spec, prefill, pace)) as firsts:
                    async for generated in firsts:
                        if not started:
                            started = True
                            note_first_token(generated)
                            self._num_decoding += 1
                        token = generated.token
                        yield noted(generated)
                while token is None or token.finish_reason is None:
                    token = await place.mailbox.token()
                    yield noted(Generated(token))
            finally:
                if started:
                    self._num_decoding -= 1
                pace.ended()
                place.close()

    def _short_of_blocks(self, mailbox: RequestOutputs, spec: RequestSpec) -> RequestError | None:
        """Error that ends a request that was just preempted; None = it waits for blocks."""
        if not is_short_of_blocks(self._worker.policy.moving, mailbox.num_preemptions):
            return None
        num_tokens = len(spec.prompt) + len(spec.output) + mailbox.num_tokens
        needed = self._worker.num_blocks(num_tokens)
        if not any(has_room(peer.load.free_blocks, needed) for peer in self._decodes()):
            return None
        return ShortOfBlocksError(mailbox.num_preemptions)

    async def _first_tokens(self, place: Place, spec: RequestSpec, prefill: PrefillMode, pace: Pace) -> AsyncGenerator[Generated, None]:
        """The first token, and after a remote prefill the first that was decoded here."""
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
        elif prefill == "remote" or (prefill == "auto" and self._offloading.goes(place, spec, hashes, self._num_decoding, pace)):
            pace.sent("remote")
            async with aclosing(self._remote.first_token(place, spec, hashes, forced=prefill == "remote")) as first:
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
        """The first token decoded here after a remote prefill, timed from the hand-over of its KV."""
        clock = asyncio.get_running_loop().time
        start = clock()
        token = await mailbox.token()
        self._worker.metrics.ttft_phase_seconds.labels("first_step").observe(clock() - start)
        note("first_step", seconds=clock() - start)
        return token
