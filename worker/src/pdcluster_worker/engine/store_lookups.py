"""Requests that wait until a shared store has answered how much of their prefix it has.

Each waits for a fraction of a second at most, and a store that does not answer is not asked for a
while: a request is computed then as if there were no store.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

from pdcluster_worker.engine.kv_tiers import KVTiers
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.tier_ports import BlockLookup, BlocksFound
from pdcluster_worker.engine.tier_rates import Rate, ReadEstimate
from pdcluster_worker.messages.engine import TIER_LOOKUPS

LOOKUP_SECONDS = 0.5
"""Time that a request waits for an answer: a store nearby takes milliseconds."""

Resume = Callable[[EngineRequest], None]


@dataclass(frozen=True, slots=True)
class Lookup:
    lookup_id: int
    keys: Sequence[bytes]
    due: float
    resume: Resume


class StoreLookups:
    def __init__(self, tiers: KVTiers, clock: Callable[[], float]) -> None:
        self.counts = dict.fromkeys(TIER_LOOKUPS, 0)
        self._tiers = tiers
        self._clock = clock
        self._ids = count()
        self._rate = Rate()  # seconds of one lookup
        self._answered = -inf  # by the clock
        self._waiting: dict[EngineRequest, Lookup] = {}
        self._num_unanswered = 0  # of requests that wait, and of those that no longer do
        # Not asked for again, unless they lose blocks: by the tokens that they had lost then.
        self._looked_up: dict[EngineRequest, int] = {}

    @property
    def num_requests(self) -> int:
        return len(self._waiting)

    @property
    def next_seconds(self) -> float | None:
        """In how many seconds a request is no longer made to wait."""
        now = self._clock()
        return min((max(0.0, each.due - now) for each in self._waiting.values()), default=None)

    def begin(
        self,
        request: EngineRequest,
        keys: Sequence[bytes],
        compute_seconds: float,
        resume: Resume,
    ) -> bool:
        """Return whether the request waits for an answer, after which it is resumed.

        compute_seconds: of the tokens of all keys; 0 = not known.
        """
        number, now = self._tiers.shared, self._clock()
        if number is None or not keys or self._looked_up.get(request) == request.num_lost_tokens:
            return False
        silence = self._tiers.tiers[number].silence
        if not silence.allows(now) or (silence.reason and self._num_unanswered):
            return False
        seconds = (self._rate.at(now) or 0.0) * (self._num_unanswered + 1)
        if seconds >= LOOKUP_SECONDS or not ReadEstimate(seconds, compute_seconds).pays:
            return False
        self._num_unanswered += 1
        self._looked_up[request] = request.num_lost_tokens
        lookup = Lookup(next(self._ids), keys, now + LOOKUP_SECONDS, resume)
        self._waiting[request] = lookup
        self._tiers.io.look_up(BlockLookup(lookup.lookup_id, number, keys))
        return True

    def settle(self) -> None:
        """Resume requests whose lookup has been answered, or is too late."""
        answers, self._tiers.found = self._tiers.found, []
        found = {answer.lookup_id: answer for answer in answers}
        self._num_unanswered -= len(answers)
        now, number = self._clock(), self._tiers.shared
        for request, lookup in list(self._waiting.items()):
            answer = found.get(lookup.lookup_id)
            if answer is None and now < lookup.due:
                continue
            assert number is not None, "a lookup without a store"
            self.counts[self._outcome(lookup, answer, number)] += 1
            del self._waiting[request]
            lookup.resume(request)

    def forget(self, request: EngineRequest) -> None:
        """It has ended."""
        self._looked_up.pop(request, None)
        self._waiting.pop(request, None)

    def _outcome(self, lookup: Lookup, answer: BlocksFound | None, number: int) -> str:
        tier = self._tiers.tiers[number]
        if answer is None:
            if self._clock() - self._answered >= LOOKUP_SECONDS:  # else others were before it
                tier.fail(f"no answer in {LOOKUP_SECONDS} s", self._clock())
            return "late"
        if answer.reason:
            tier.fail(answer.reason, self._clock())
            return "failed"
        tier.succeed()
        self._answered = self._clock()
        self._rate.add(answer.seconds, self._clock())
        self._tiers.learn(lookup.keys[: answer.num_found])
        return "found" if answer.num_found else "absent"
