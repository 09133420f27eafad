"""The choice of a decode worker, as an ingress makes it: reports, and what it has sent since.

`serving.ingress.decode_router` does the same beside its connections; here only workers that have
reported, or that this ingress has sent to, are looked at again.
"""

from collections.abc import Sequence
from random import Random

from msgspec.structs import replace

from pdcluster_schema.policy import PolicyConfig
from pdcluster_simulator.requests import SimulatedRequest
from pdcluster_simulator.workers import ClusterWorker, charges_of
from pdcluster_worker.routing.active_load import ActiveLoad, Charges
from pdcluster_worker.routing.decode_choice import PREFIX_POLICIES, DecodeChooser
from pdcluster_worker.routing.decode_costs import DecodeCandidate, RequestSize
from pdcluster_worker.routing.prefix_index import PrefixIndex, RecentPrefixes

_UNREPORTED_SECONDS = 2.0


class Members:
    """Decode workers that take requests, in the order of their reports.  version: of the list"""

    def __init__(self) -> None:
        self.version = 0
        self.workers: dict[str, ClusterWorker] = {}
        self.reports: list[str] = []
        self.prefixes = PrefixIndex()

    def renew(self, workers: Sequence[ClusterWorker]) -> None:
        self.workers = {worker.key: worker for worker in workers}
        self._restart()

    def reported(self, worker: ClusterWorker) -> None:
        if worker.key not in self.workers:
            return
        self.reports.append(worker.key)
        if len(self.reports) > 64 * len(self.workers):
            self._restart()  # an ingress that has not read them looks at all workers

    def _restart(self) -> None:
        self.version += 1
        self.reports.clear()


class SimulatedIngress:
    """worker: its own; None = a router's."""

    def __init__(
        self,
        worker: ClusterWorker | None,
        members: Members,
        policy: PolicyConfig,
        block_size: int,
        draw: Random,
    ) -> None:
        self.worker = worker
        self._members = members
        self._policy = policy.decode_score
        self._block_size = block_size
        self._chooser = DecodeChooser(draw)
        self._load = ActiveLoad()
        self._recent = RecentPrefixes()
        self._uses_prefixes = self._policy.policy in PREFIX_POLICIES
        self._version = -1
        self._num_read = 0
        self._changed: set[str] = set()
        self._candidates: dict[str, DecodeCandidate] = {}

    def choose(self, request: SimulatedRequest, now: float) -> ClusterWorker | None:
        """None = no worker takes requests."""
        members = self._members
        if not members.workers:
            return None
        self._renew()
        candidates = self._candidates
        if self._uses_prefixes and request.hashes:
            candidates = self._matched(request, now)
        choice = self._chooser.choose(
            self._policy,
            RequestSize(request.prompt_tokens, self._block_size),
            [*candidates.values()],
        )
        worker, chosen = members.workers[choice.key], candidates[choice.key]
        uncached = max(0, request.prompt_tokens - chosen.matched_blocks * self._block_size)
        blocks = -(-request.prompt_tokens // self._block_size)
        charges = Charges(1, uncached, blocks)
        self._load.add(request.request_id, worker.key, self._report(worker), charges)
        self._changed.add(worker.key)
        if self._uses_prefixes and request.hashes:
            self._recent.note(worker.key, request.hashes, now)
        return worker

    def on_first_token(self, request: SimulatedRequest, worker: ClusterWorker) -> None:
        self._load.prefilled(request.request_id)
        self._changed.add(worker.key)

    def on_end(self, request: SimulatedRequest, worker: ClusterWorker) -> None:
        self._load.free(request.request_id)
        self._changed.add(worker.key)

    def _report(self, worker: ClusterWorker) -> object:
        return None if worker is self.worker else worker.load

    def _renew(self) -> None:
        members, changed = self._members, self._changed
        if self._version != members.version:
            self._version, self._candidates = members.version, {}
            changed.update(members.workers)
        else:
            changed.update(members.reports[self._num_read :])
        self._num_read = len(members.reports)
        if self.worker is not None and self.worker.key in members.workers:
            changed.add(self.worker.key)
        for key in changed:
            if (worker := members.workers.get(key)) is not None:
                self._candidates[key] = self._candidate(worker)
        changed.clear()

    def _candidate(self, worker: ClusterWorker) -> DecodeCandidate:
        if worker is self.worker:
            load = worker.measured()  # it knows itself at any time
            own = charges_of(load, worker.num_waiting + worker.num_decoding)
            charges = self._load.potential(worker.key, load, own)
            return worker.candidate_of(charges, is_self=True)
        if not self._load.num_requests(worker.key):
            return worker.candidate
        return worker.candidate_of(self._load.potential(worker.key, worker.load, worker.charges))

    def _matched(self, request: SimulatedRequest, now: float) -> dict[str, DecodeCandidate]:
        self._recent.seconds = self._policy.recent_seconds
        if self._policy.kv_events:
            matches = self._members.prefixes.match_all(request.hashes)
            recent = self._recent.match_all(request.hashes, now, _UNREPORTED_SECONDS)
            for key, number in recent.items():
                matches[key] = max(number, matches.get(key, 0))
            is_recent = set(self._recent.match_all(request.hashes[:1], now))
        else:
            matches = dict(self._recent.match_all(request.hashes, now))
            is_recent = set(matches)
        found = dict(self._candidates)
        for key in {*matches, *is_recent} & found.keys():
            found[key] = replace(
                found[key], matched_blocks=matches.get(key, 0), is_recent=key in is_recent
            )
        return found
