"""Entry of requests: the chosen decode workers run all choices, one hop away at most."""

import time
from collections.abc import AsyncGenerator, Callable
from functools import partial

from msgspec.structs import replace

from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.decode_choice import NO_HINTS, RouteHints
from pdcluster_worker.routing.qos.load_shedding import aged
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.ingress.attempt import HedgePolicy, RequestProgress
from pdcluster_worker.serving.ingress.branches import BranchPlacer, Groups, ParallelBranches
from pdcluster_worker.serving.ingress.decode_router import LOCAL, DecodeRouter
from pdcluster_worker.serving.ingress.migration import AttemptRoute, Migration
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.streams import Reader, Stream


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
        self._decodes = decodes
        self._placer = BranchPlacer(worker, local, self._router, pod)
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
        same worker or where its KV is read from there (`routing.branches`).
        """
        arrival = self._clock()
        with self._router.track(specs, hints):
            await self._router.wait_for_capacity(specs)
            # decided once: a drain that begins later lets the request go on
            may_run_locally = self._worker.takes(specs[0])
            peer = self._router.choose(specs[0], may_run_locally)
            if peer is None and not may_run_locally:
                if not self._takes_late():
                    raise self._worker.refusal()
                may_run_locally = True
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

        def begin(index: int, route: AttemptRoute) -> AsyncGenerator[Generated, None]:
            spec, mode = specs[index], others if index else prefill
            if route.kv_holder:
                spec = replace(spec, kv_holder=route.kv_holder)
            progress = RequestProgress(spec, mode, self._clock, arrival, kv_holder=route.kv_holder)
            return self._migration.run(progress, route)

        def place(indices: list[int]) -> Groups:
            if specs[0].prefiller:  # an endpoint picker has chosen this worker too
                return []
            moved = self._placer.place([specs[i] for i in indices], route, self._decodes())
            numbers = {spec.request_id: index for index, spec in enumerate(specs)}
            return [(where, [numbers[spec.request_id] for spec in taken]) for where, taken in moved]

        if len(specs) == 1:
            return begin(0, route)
        merged = ParallelBranches(len(specs), route, begin, place).merged()
        for index, spec in enumerate(specs):
            self._choices[spec.request_id] = partial(merged.end, index)
        return merged

    def _takes_late(self) -> bool:
        """Return whether a request that no other worker takes runs here, though this one drains: it
        came before the Service knew of that.
        """
        worker = self._worker
        has_engine = worker.engineless is None and worker.engines.problem is None
        return has_engine and worker.role != "prefill" and not worker.is_drain_noticed()

    def abort(self, request_id: str) -> None:
        if (end := self._choices.get(request_id)) is not None:
            end()

    def on_change(self) -> None:
        """A peer's state changed: what runs on one that drains goes on elsewhere."""
        self._migration.on_change()
