"""Prompts that follow another one with the same prefix: what is known of those in hand, and the
wait for KV that is on its way here.

Which prompts are worth a wait is `decode.offloading`'s decision; the index is
`routing.prefixes_in_hand`'s.
"""

import asyncio
from collections.abc import Sequence

from pdcluster_worker.dispatch.engines.engines import Place
from pdcluster_worker.journeys.journey import note
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.routing.prefixes_in_hand import Coming, PrefixesInHand


class Following:
    """One per decode worker."""

    def __init__(self) -> None:
        self._prefixes = PrefixesInHand()
        self._settled: dict[str, asyncio.Event] = {}  # of each prompt on its way

    def begin(
        self, place: Place, spec: RequestSpec, hashes: Sequence[bytes], *, is_here: bool
    ) -> None:
        """A prompt is computed from now on: by this engine, or for it; see `PrefixesInHand.begin`.

        No KV comes of a prompt without a second token, nor stays in an engine without a cache.
        """
        if not place.engine.facts.prefix_caching or not hashes:
            return
        if not is_here:
            if spec.sampling.max_tokens == 1:
                return
            self._settled[spec.request_id] = asyncio.Event()
        self._prefixes.begin(
            spec.request_id, _key(place), hashes, priority=spec.priority, is_here=is_here
        )

    def arrived(self, request_id: str) -> None:
        """Its KV is here, or the engine computes it after all; an unknown id is a no-op."""
        self._prefixes.arrived(request_id)
        self._settle(request_id)

    def ended(self, request_id: str) -> None:
        """Forget a request; whatever waits for it goes on.  An unknown id is a no-op."""
        self._prefixes.ended(request_id)
        self._settle(request_id)

    def here(self, place: Place, hashes: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that the engine holds or computes for running requests."""
        return self._prefixes.here(_key(place), hashes)

    def coming(self, place: Place, spec: RequestSpec, hashes: Sequence[bytes]) -> Coming | None:
        """The request on its way that brings most of the prompt."""
        return self._prefixes.coming(_key(place), hashes, priority=spec.priority)

    async def wait(self, coming: Coming) -> float:
        """Wait until that request's KV is here or will not come; the seconds that it took."""
        clock = asyncio.get_running_loop().time
        start = clock()
        await self._settled[coming.request_id].wait()
        note("prefix", request=coming.request_id, waited_seconds=clock() - start)
        return clock() - start

    def _settle(self, request_id: str) -> None:
        if (settled := self._settled.pop(request_id, None)) is not None:
            settled.set()


def _key(place: Place) -> str:
    return str(place.engine.rank)
