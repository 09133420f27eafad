"""Entry of requests: the chosen decode worker runs all choices, one hop away at most."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from msgspec.structs import replace

from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.decode_choice import NO_HINTS, RouteHints
from pdcluster_worker.routing.qos.load_shedding import aged
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.ingress.attempt import HedgePolicy, RequestProgress
from pdcluster_worker.serving.ingress.decode_router import LOCAL, DecodeRouter
from pdcluster_worker.serving.ingress.migration import AttemptRoute, Migration
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.streams import Merged, Reader, Stream


class Ingress:
    """Takes requests from HTTP; one per worker, a router included."""

    def __init__(
        self,
        worker: WorkerContext,
        local: DecodeDispatcher,
        decodes: Callable[[], list[Peer]],
        pod: str = LOCAL,
    ) -> None:
        self._worker = worker
        self._clock = time.monotonic
        self._local = local
        self._router = DecodeRouter(worker, local, decodes, pod)
        self._hedge_policy = HedgePolicy(worker, local, decodes)
        self._migration = Migration(worker, local, decodes, self._router)
        self._choices: dict[str, Callable[[], None]] = {}  # ends one of several

    async def generate(
        self,
        specs: list[RequestSpec],
        prefill: PrefillMode,
        hints: RouteHints = NO_HINTS,
        reader: Reader[Generated] | None = None,
    ) -> AsyncGenerator[Generated, None]:
        """All choices of one prompt, as they come.  Raises RequestError.

        Closing the iterator ends every attempt.
        reader: takes later tokens of a lone choice while it is where it began, on this worker, and
                without a hedge.
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
                route = AttemptRoute(peer, may_run_locally, reader)
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
        runs = [
            self._migration.run(
                RequestProgress(spec, others if index else prefill, self._clock, arrival), route
            )
            for index, spec in enumerate(specs)
        ]
        if len(runs) == 1:
            return runs[0]
        merged = sample_in_parallel(runs)
        for index, spec in enumerate(specs):
            self._choices[spec.request_id] = partial(merged.end, index)
        return merged

    def abort(self, request_id: str) -> None:
        if (end := self._choices.get(request_id)) is not None:
            end()

    def on_change(self) -> None:
        """A peer's state changed: what runs on one that drains goes on elsewhere."""
        self._migration.on_change()


def sample_in_parallel(choices: Sequence[AsyncGenerator[Generated, None]]) -> Merged[Generated]:
    """The others start when the first has made its second token, or has ended."""
    prompt_cached = asyncio.Event()
    return Merged([_choice(index, each, prompt_cached) for index, each in enumerate(choices)])


async def _choice(
    index: int, tokens: AsyncGenerator[Generated, None], prompt_cached: asyncio.Event
) -> AsyncGenerator[Generated, None]:
    num_tokens = 0
    async with aclosing(tokens):
        try:
            if index > 0:
                await prompt_cached.wait()
            async for generated in tokens:
                num_tokens += 1
                if index == 0 and num_tokens == 2:
                    prompt_cached.set()
                yield replace(generated, index=index)
        finally:
            if index == 0:
                prompt_cached.set()
