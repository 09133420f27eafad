"""The choices of one prompt, as parallel branches.

The first one computes it; the others begin where its KV is, or read it from there.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.branches import (
    BranchPlacement,
    BranchSize,
    BranchWorker,
    place_branches,
)
from pdcluster_worker.routing.decode_costs import DecodeCandidate
from pdcluster_worker.routing.qos.load_shedding import tier_of
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.ingress.decode_router import DecodeRouter, name_of
from pdcluster_worker.serving.ingress.migration import AttemptRoute
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.streams import Merged
from pdcluster_worker.tracing.request_trace import add_event

Groups = list[tuple[AttemptRoute, list[int]]]
"""Choices by their numbers, and the start of each group."""


class ParallelBranches:
    """All choices of a prompt.

    begin: the tokens of a choice.
    place: groups of choices for other workers; the rest begins where the first one runs.
    """

    def __init__(
        self,
        num_choices: int,
        first: AttemptRoute,
        begin: Callable[[int, AttemptRoute], AsyncGenerator[Generated, None]],
        place: Callable[[list[int]], Groups],
    ) -> None:
        self._begin = begin
        self._place = place
        self._routes = [first] * num_choices
        self._begins = [asyncio.Event() for _ in range(num_choices)]
        # Choices that wait for the prompt to be cached, by the choice that brings it.
        self._followers = {0: list(range(1, num_choices))}
        self._over: set[int] = set()
        self._begins[0].set()

    def merged(self) -> Merged[Generated]:
        return Merged([self._choice(index) for index in range(len(self._begins))])

    async def _choice(self, index: int) -> AsyncGenerator[Generated, None]:
        num_tokens = 0
        try:
            await self._begins[index].wait()
            async with aclosing(self._begin(index, self._routes[index])) as tokens:
                async for generated in tokens:
                    num_tokens += 1
                    if num_tokens == 2:
                        self._cached(index)
                    yield replace(generated, index=index)
        finally:
            self._over.add(index)
            self._ended(index)

    def _cached(self, index: int) -> None:
        """Begin the others: the worker of this choice has the prompt in its cache."""
        waiting = self._waiting(index)
        groups = self._place(waiting) if index == 0 and waiting else []
        for route, members in groups:
            for each in members:
                self._routes[each] = route
            self._lead(members)
        moved = {each for _, members in groups for each in members}
        for each in waiting:
            if each not in moved:
                self._begins[each].set()

    def _ended(self, index: int) -> None:
        """Begin what still waits for it: all after the first, else one that brings the prompt."""
        waiting = self._waiting(index)
        if index > 0:
            self._lead(waiting)
            return
        for each in waiting:
            self._begins[each].set()

    def _lead(self, members: list[int]) -> None:
        if members:
            self._followers[members[0]] = members[1:]
            self._begins[members[0]].set()

    def _waiting(self, index: int) -> list[int]:
        return [each for each in self._followers.pop(index, []) if each not in self._over]


class BranchPlacer:
    """Decides where the other choices of a prompt run; one per ingress.

    pod: this worker's, "" = it has none.
    """

    def __init__(
        self, worker: WorkerContext, local: DecodeDispatcher, router: DecodeRouter, pod: str
    ) -> None:
        self._worker = worker
        self._local = local
        self._router = router
        self._pod = pod

    def place(
        self, specs: Sequence[RequestSpec], route: AttemptRoute, peers: Sequence[Peer]
    ) -> list[tuple[AttemptRoute, list[RequestSpec]]]:
        """Choices that leave the worker of `route`, which has the prompt's KV."""
        if self._worker.policy.branches == "Local":
            return []
        home = route.where
        placement = self._decide(specs, home, may_run_locally=route.may_run_locally)
        found, left = [], list(specs)
        by_key: dict[str, Peer | None] = {self._pod: None, **{peer.key: peer for peer in peers}}
        for key, count in placement.counts.items():
            where, taken = by_key[key], left[-count:]
            if where is not None or self._admits(taken):
                del left[-count:]
                self._router.charge_branches(taken, where)
                holder = self._pod if home is None else home.key
                moved = AttemptRoute(where, route.may_run_locally, None, kv_holder=holder)
                found.append((moved, taken))
        self._note(placement, home, len(left), found)
        return found

    def _decide(
        self, specs: Sequence[RequestSpec], home: Peer | None, *, may_run_locally: bool
    ) -> BranchPlacement:
        spec, policy = specs[0], self._worker.policy
        # Each worker may refuse a request of low priority; log probabilities of a prompt are
        # computed, not cached.
        together = tier_of(spec.priority) == "low" or spec.sampling.prompt_logprobs is not None
        if together or not (key := self._pod if home is None else home.key):
            return BranchPlacement({}, "bound")
        may_run_locally = may_run_locally and self._worker.engine_ready.hands_over_kv
        candidates = self._router.branch_candidates(spec, may_run_locally)
        workers = {candidate.key: self._branch_worker(candidate, spec) for candidate in candidates}
        if key not in workers:
            return BranchPlacement({}, "bound")
        # Without these choices, which are charged already; a report has none of them.
        reported = self._local.num_requests if home is None else home.load.num_requests
        others = max(reported, workers[key].num_requests - len(specs))
        size = BranchSize(
            len(specs),
            min(spec.sampling.max_tokens, policy.estimation.preset_output_tokens),
            self._worker.block_size,
        )
        at_home = BranchWorker(key, others, workers.pop(key).free_blocks)
        busy_requests = policy.offload.decode_load_threshold
        return place_branches(at_home, list(workers.values()), size, busy_requests)

    def _branch_worker(self, worker: DecodeCandidate, spec: RequestSpec) -> BranchWorker:
        lacking = max(0, spec.num_tokens - worker.matched_blocks * self._worker.block_size)
        free_blocks = max(0, worker.total_blocks - worker.decode_blocks)
        return BranchWorker(worker.key, worker.num_requests, free_blocks, lacking)

    def _admits(self, specs: Sequence[RequestSpec]) -> bool:
        try:
            self._local.admit(specs)
        except RequestError:
            return False
        return True

    def _note(
        self,
        placement: BranchPlacement,
        home: Peer | None,
        num_home: int,
        moved: list[tuple[AttemptRoute, list[RequestSpec]]],
    ) -> None:
        num_moved = sum(len(taken) for _, taken in moved)
        metrics = self._worker.metrics
        metrics.request_branches.labels("home").inc(num_home)
        metrics.request_branches.labels("moved").inc(num_moved)
        places = " ".join(f"{name_of(route.where)}={len(taken)}" for route, taken in moved)
        add_event(
            "branches",
            reason=placement.reason,
            home=name_of(home),
            at_home=num_home,
            **({"moved": places} if moved else {}),
        )
