"""Entry of requests: the chosen decode worker runs all choices, one hop away at most."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

from msgspec.structs import replace

from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.decode_choice import NO_HINTS, RouteHints
from pdcluster_worker.routing.qos.load_shedding import aged
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.ingress.attempt import HedgePolicy, RequestProgress
from pdcluster_worker.serving.ingress.decode_router import LOCAL, DecodeRouter
from pdcluster_worker.serving.ingress.migration import AttemptRoute, AttemptStream, Migration
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.streams import Merged, Reader, Stream


class ParallelSampling(AsyncIterator[Generated]):
    """The others start when the first has made its second token, or has ended."""

    def __init__(self, streams: Mapping[str, Stream[Generated]]) -> None:
        prompt_cached = asyncio.Event()
        self._positions = {request_id: index for index, request_id in enumerate(streams)}
        self._merged = Merged(
            [
                _ParallelChoice(index, stream, prompt_cached)
                for index, stream in enumerate(streams.values())
            ]
        )

    def abort(self, request_id: str) -> None:
        """End one choice; its siblings go on.  An ended one is a no-op."""
        self._merged.end(self._positions[request_id])

    async def __anext__(self) -> Generated:
        return await anext(self._merged)

    async def aclose(self) -> None:
        await self._merged.aclose()


class _ParallelChoice(AsyncIterator[Generated]):
    """One choice.  prompt_cached: set by the first one, waited for by the others."""

    def __init__(self, index: int, stream: Stream[Generated], prompt_cached: asyncio.Event) -> None:
        self._index = index
        self._stream = stream
        self._prompt_cached = prompt_cached
        self._num_tokens = 0

    async def __anext__(self) -> Generated:
        if self._index > 0:
            await self._prompt_cached.wait()
        generated = await anext(self._stream)
        self._num_tokens += 1
        if self._index == 0 and self._num_tokens == 2:
            self._prompt_cached.set()
        return replace(generated, index=self._index)

    async def aclose(self) -> None:
        """End it; the others wait no more for the first one."""
        if self._index == 0:
            self._prompt_cached.set()
        await self._stream.aclose()


class Ingress:
    """Takes requests from HTTP; one per worker, a router included."""

    def __init__(
        self,
        worker: WorkerContext,
        local: DecodeDispatcher,
        decodes: Callable[[], list[Peer]],
        pod: str = LOCAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._clock = clock
        self._local = local
        self._router = DecodeRouter(worker, local, decodes, pod)
        self._hedge_policy = HedgePolicy(worker, local, decodes)
        self._migration = Migration(worker, local, decodes, self._router)
        self._choices: dict[str, ParallelSampling] = {}

    async def generate(
        self,
        specs: list[RequestSpec],
        prefill: PrefillMode,
        hints: RouteHints = NO_HINTS,
        reader: Reader[Generated] | None = None,
    ) -> AsyncGenerator[Generated, None]:
        """All choices of one prompt, as they come.  reader: see `Backend.generate`.

        Closing the iterator ends every attempt.  Raises RequestError.
        The first choice may be prefilled remotely; the others start from its cached prompt, on the
        same worker.
        """
        arrival = self._clock()
        with self._router.track(specs, hints):
            await self._router.wait_for_capacity(specs)
            # decided once: a drain that begins later lets the request go on
            may_run_locally = self._worker.takes_new
            peer = self._router.choose(specs[0], may_run_locally)
            if peer is None and not may_run_locally:
                raise self._worker.refusal()
            with self._worker.request():
                route = AttemptRoute(peer, may_run_locally, reader=reader)
                tokens = self._run(specs, prefill, route, arrival)
                try:
                    async for generated in tokens:
                        self._router.on_token(specs[generated.index].request_id)
                        yield generated
                finally:
                    for spec in specs:  # first: the closing may be cut off
                        self._choices.pop(spec.request_id, None)
                    await tokens.aclose()

    def _run(
        self, specs: list[RequestSpec], prefill: PrefillMode, route: AttemptRoute, arrival: float
    ) -> Stream[Generated]:
        """Run all choices; a lone one without a task or a queue.  Raises RequestError."""
        if route.where is None:
            self._local.admit([aged(spec, self._clock() - arrival) for spec in specs])
        route.hedge = self._hedge_policy.hedge(specs, route.where)
        others: PrefillMode = "local" if prefill == "remote" else prefill
        progresses = [
            RequestProgress(spec, others if index else prefill, self._clock, arrival)
            for index, spec in enumerate(specs)
        ]
        runs = {
            progress.spec.request_id: AttemptStream(self._migration, progress, route)
            for progress in progresses
        }
        if len(runs) == 1:
            return runs.popitem()[1]
        choices = ParallelSampling(runs)
        self._choices.update(dict.fromkeys(runs, choices))
        return choices

    def abort(self, request_id: str) -> None:
        """End one of several choices early; a no-op for others."""
        if (choices := self._choices.get(request_id)) is not None:
            choices.abort(request_id)

    def on_change(self) -> None:
        """A peer's state changed: what runs on one that drains goes on elsewhere."""
        self._migration.on_change()
