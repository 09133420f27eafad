"""Prefixes that running requests share: cached here, or on their way."""

import asyncio
from collections.abc import Callable, Sequence

from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.routing.inflight_prefix_index import (
    InflightPrefix,
    InflightPrefixIndex,
    longest_wait,
)
from pdcluster_worker.serving.engines.engines import RequestHandle
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing.request_trace import add_event

POLL_SECONDS = 1.0
"""Time after which a prompt that waits asks again whether it still should."""


class InflightPrefixes:
    """One per decode worker."""

    def __init__(self, worker: WorkerContext) -> None:
        self._worker = worker
        self._prefixes = InflightPrefixIndex()
        self._settled: dict[str, asyncio.Event] = {}  # of each prompt on its way

    def begin(
        self, place: RequestHandle, spec: RequestSpec, hashes: Sequence[bytes], *, is_local: bool
    ) -> None:
        """A prompt is computed from now on, by this engine or for it."""
        if not place.engine.facts.prefix_caching or not hashes:
            return
        if not is_local:
            if spec.sampling.max_tokens == 1:
                return
            self._settled[spec.request_id] = asyncio.Event()
        self._prefixes.begin(
            spec.request_id, _key(place), hashes, priority=spec.priority, is_local=is_local
        )

    def arrived(self, request_id: str) -> None:
        """Its KV is here, or the engine computes it after all; an unknown id is a no-op."""
        self._prefixes.arrived(request_id)
        self._settle(request_id)

    def ended(self, request_id: str) -> None:
        """Forget a request; whatever waits for it goes on.  An unknown id is a no-op."""
        self._prefixes.ended(request_id)
        self._settle(request_id)

    def local_tokens(self, place: RequestHandle, spec: RequestSpec, hashes: Sequence[bytes]) -> int:
        num_blocks = self._prefixes.local(_key(place), hashes, priority=spec.priority)
        return self._tokens(spec, num_blocks)

    def coming(
        self, place: RequestHandle, spec: RequestSpec, hashes: Sequence[bytes]
    ) -> tuple[InflightPrefix, int] | None:
        found = self._prefixes.coming(_key(place), hashes, priority=spec.priority)
        return None if found is None else (found, self._tokens(spec, found.num_blocks))

    async def wait(self, spec: RequestSpec, awaited: Callable[[], InflightPrefix | None]) -> float:
        """Wait for the awaited prefix, in bounds; returns the seconds."""
        clock = asyncio.get_running_loop().time
        start = clock()
        most = longest_wait(spec.ttft_slo_seconds, spec.deadline_seconds)
        last = ""
        self._worker.num_waiting_for_prefix += 1
        try:
            while (left := start + most - clock()) > 0 and (coming := awaited()) is not None:
                last = coming.request_id
                await self._settles(last, min(left, POLL_SECONDS))
        finally:
            self._worker.num_waiting_for_prefix -= 1
        if not last:
            return 0.0
        add_event("prefix", request=last, waited_seconds=clock() - start)
        return clock() - start

    async def _settles(self, request_id: str, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._settled[request_id].wait()
        except TimeoutError:
            return

    def _settle(self, request_id: str) -> None:
        if (settled := self._settled.pop(request_id, None)) is not None:
            settled.set()

    def _tokens(self, spec: RequestSpec, num_blocks: int) -> int:
        """Tokens of so many blocks; at least one is left to compute, as in the engine."""
        size = self._worker.block_size
        num_tokens = len(spec.prompt) + len(spec.output)
        return min(num_blocks, (num_tokens - 1) // size) * size


def _key(place: RequestHandle) -> str:
    return place.engine.facts.engine_id
