"""Choose the decode worker of a request: load, prefix matches, failures, policy."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import is_, itemgetter

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.routing import DecodeScoreSpec
from pdcluster_schema.text import quoted
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.active_load import ActiveLoad, Charges
from pdcluster_worker.routing.decode_choice import (
    NO_HINTS,
    PREFIX_POLICIES,
    DecodeChoice,
    DecodeChooser,
    RouteHints,
)
from pdcluster_worker.routing.decode_costs import DecodeCandidate, RequestSize
from pdcluster_worker.routing.prefix_index import RecentPrefixes
from pdcluster_worker.routing.qos.load_shedding import MAX_RETRY_SECONDS
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.ingress.wait_queue import WaitQueue
from pdcluster_worker.serving.worker_context import REPORT_SECONDS, WorkerContext
from pdcluster_worker.tracing.request_trace import add_event

LOCAL = ""
"""Key of the worker that chooses, where it has no other name."""


def key_of(where: Peer | None) -> str:
    """Key of a peer, or `LOCAL` for this worker (None)."""
    return LOCAL if where is None else where.key


def name_of(where: Peer | None) -> str:
    return "here" if where is None else where.key


TAINT_SECONDS = 10.0
"""Time for which a failure counts against a worker."""

_UNREPORTED_SECONDS = 2 * REPORT_SECONDS
"""A prompt sent within this time may be missing in the events and counts as cached."""

_TRACED_COSTS = 8


@dataclass(slots=True)
class _Routed:
    """State that the choices of one prompt share."""

    hints: RouteHints
    uncharged: set[str]  # request ids of those that no worker is charged with yet
    hashes: list[bytes] | None = None  # of the prompt's blocks, made once for all choices and moves


@dataclass(frozen=True, slots=True)
class _Report:
    """A worker's last report of its load, as a policy reads it."""

    load: WorkerLoad
    charges: Charges
    candidate: DecodeCandidate  # as it is while the report is all that is known of the worker

    @classmethod
    def of(cls, key: str, load: WorkerLoad) -> "_Report":
        charges = _reported(load, load.num_requests)
        return cls(load, charges, _candidate(key, charges, load, 0, is_recent=False))


class DecodeRouter:
    """One per ingress."""

    def __init__(
        self,
        worker: WorkerContext,
        local: DecodeDispatcher,
        decodes: Callable[[], Sequence[Peer]],
        pod: str = LOCAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._local = local
        self._decodes = decodes
        self._pod = pod
        self._clock = clock
        self._chooser = DecodeChooser(random.Random())
        self._load = ActiveLoad()
        self._recent = RecentPrefixes()
        self._routed: dict[str, _Routed] = {}
        self._failed: dict[str, float] = {}  # when each peer last failed a request
        # whose prefixes are noted: another engine of a pod begins with none
        self._known: dict[str, Peer] = {}
        self._reports: dict[str, _Report] = {}
        self._turn = asyncio.Lock()
        self._eased = asyncio.Event()
        self._held = WaitQueue()
        self._held_seconds = 0.0  # that the last one waited,
        self._held_at = -math.inf  # and when that was

    @contextmanager
    def track(self, specs: Sequence[RequestSpec], hints: RouteHints = NO_HINTS) -> Iterator[None]:
        """Keep account of the choices of one prompt until the end: charges and hints."""
        routed = _Routed(hints, {spec.request_id for spec in specs})
        self._routed.update((spec.request_id, routed) for spec in specs)
        try:
            yield
        finally:
            for spec in specs:
                self._load.free(spec.request_id)
                self._routed.pop(spec.request_id, None)
            self._eased.set()

    def on_token(self, request_id: str) -> None:
        """Note a choice's token: after the first one its prompt waits no more."""
        if self._load.prefilled(request_id):
            self._eased.set()

    def choose(
        self,
        spec: RequestSpec,
        may_run_locally: bool,
        failed: Container[str] = (),
        full: Container[str] = (),
    ) -> Peer | None:
        """The peer to run it; None for this worker, or when no worker takes it.

        Raises RequestError: 503 if the request names a worker that cannot run it, 404 if no worker
        has its adapter.
        """
        now, routed = self._clock(), self._routed.get(spec.request_id) or _Routed(NO_HINTS, set())
        peers = self._with_adapter(spec, self._peers(failed, now))
        if full:
            peers = {key: peer for key, peer in peers.items() if key not in full}
        policy = routed.hints.decode_score or self._policy.decode_score
        if policy.policy in PREFIX_POLICIES and routed.hashes is None:
            routed.hashes = self._worker.hashes(spec)
        hashes = (routed.hashes or []) if policy.policy in PREFIX_POLICIES else []
        candidates = self._candidates(policy, peers, may_run_locally, hashes, now)
        hints = routed.hints
        if spec.prefiller and may_run_locally and not hints.worker:
            # the endpoint picker that named the prefill worker has chosen this one too
            hints = replace(hints, worker=self._pod)
        decision = self._decide(policy, spec, hints, candidates)
        if decision is None:
            return None
        chosen = next(c for c in candidates if c.key == decision.key)
        peer = peers.get(decision.key)
        self._charge(spec, chosen, None if peer is None else peer.load, routed)
        if hashes:
            self._recent.note(decision.key, hashes, now)
        _trace(decision, chosen)
        return peer

    def _with_adapter(self, spec: RequestSpec, peers: dict[str, Peer]) -> dict[str, Peer]:
        """Raises RequestError where none has it, and not this worker either."""
        if not spec.adapter_weights:
            return peers
        found = {key: peer for key, peer in peers.items() if spec.runs_with(peer.load.adapters)}
        if not found and not spec.runs_with(self._worker.adapters):
            raise RequestError(
                f"adapter {quoted(spec.adapter)} is loaded at no worker that takes requests now, "
                "or with other weights: load it again, or retry later",
                status=404,
                param="model",
                code="model_not_found",
            )
        return found

    def branch_candidates(self, spec: RequestSpec, may_run_locally: bool) -> list[DecodeCandidate]:
        """Workers for a further choice of a prompt; none for one that stays with the first."""
        now, routed = self._clock(), self._routed[spec.request_id]
        policy = routed.hints.decode_score or self._policy.decode_score
        if routed.hints.worker or (routed.hints.session and policy.session_affinity):
            return []
        if routed.hashes is None:
            routed.hashes = self._worker.hashes(spec)
        peers = {
            key: peer
            for key, peer in self._peers((), now).items()
            if peer.hands_over_kv and spec.runs_with(peer.load.adapters)
        }
        found = self._candidates(policy, peers, may_run_locally, routed.hashes, now)
        return [candidate for candidate in found if candidate.key not in self._failed]

    def charge_branches(self, specs: Sequence[RequestSpec], where: Peer | None) -> None:
        """Charge these choices to the worker that takes them; the first one brings the prompt."""
        key, report = (self._pod, None) if where is None else (where.key, where.load)
        blocks = self._worker.num_blocks(specs[0].num_tokens)
        for spec in specs:
            self._load.add(spec.request_id, key, report, Charges(1, 0, blocks))
            blocks = 1

    async def wait_for_capacity(self, specs: Sequence[RequestSpec]) -> None:
        """Wait while every worker is over the queue threshold.  Raises RequestError 503."""
        if not self._held.num_requests and not self._all_busy():
            return
        start, num_tokens = self._clock(), sum(spec.num_tokens for spec in specs)
        with self._held.join(self._worker, num_tokens, self._recently_held()):
            async with self._turn:
                await self._until_eased()
        self._held_at = self._clock()
        self._held_seconds = self._held_at - start
        add_event("held", seconds=self._held_seconds)

    def _recently_held(self) -> float | None:
        return self._held_seconds if self._clock() - self._held_at <= MAX_RETRY_SECONDS else None

    async def _until_eased(self) -> None:
        while self._all_busy():
            self._eased.clear()
            # Not wait_for: Python 3.11's loses a cancellation that comes together with the event.
            with suppress(TimeoutError):  # a report may have come
                async with asyncio.timeout(REPORT_SECONDS):
                    await self._eased.wait()

    def _all_busy(self) -> bool:
        threshold = self._policy.decode_score.queue_threshold_tokens
        if threshold is None:
            return False
        now = self._clock()
        takes_new = self._worker.takes_new
        candidates = self._candidates(
            self._policy.decode_score, self._peers((), now), takes_new, [], now
        )
        return bool(candidates) and all(c.prefill_tokens > threshold for c in candidates)

    @property
    def _policy(self) -> PolicyConfig:
        return self._worker.policy

    def _peers(self, failed: Container[str], now: float) -> dict[str, Peer]:
        """Those that take new work, by key; forgets caches of former engines."""
        found = self._decodes()
        if len(found) != len(self._known) or not all(map(is_, found, self._known.values())):
            for peer in found:
                if self._known.get(peer.key) is not peer:
                    self._recent.drop(peer.key, now)
            self._known = {peer.key: peer for peer in found}
            self._reports.clear()
        if not failed:
            return self._known
        self._failed.update((key, now) for key in self._known if key in failed)
        return {key: peer for key, peer in self._known.items() if key not in failed}

    def _candidates(
        self,
        policy: DecodeScoreSpec,
        peers: dict[str, Peer],
        may_run_locally: bool,
        hashes: Sequence[bytes],
        now: float,
    ) -> list[DecodeCandidate]:
        matches, recent = self._matches(policy, hashes, now)
        self._failed = {key: at for key, at in self._failed.items() if now - at < TAINT_SECONDS}
        self._renew_reports(peers)
        found = {key: self._reports[key].candidate for key in peers}
        for key in {*matches, *recent, *self._failed, *self._load.workers()} & peers.keys():
            report = self._reports[key]
            charges = self._load.potential(key, report.load, report.charges)
            taint = policy.failure_taint if key in self._failed else 1.0
            found[key] = _candidate(
                key, charges, report.load, matches.get(key, 0), key in recent, taint=taint
            )
        candidates = list(found.values())
        if may_run_locally:
            load = self._worker.load()
            charges = self._load.potential(
                self._pod, load, _reported(load, self._local.num_requests)
            )
            matched = matches.get(self._pod, 0)
            if policy.kv_events and hashes:
                own = max(matched, self._worker.engines.matched_blocks(hashes))
                matched = self._worker.matched_blocks(hashes, own)
            candidates.append(
                _candidate(self._pod, charges, load, matched, self._pod in recent, is_self=True)
            )
        return candidates

    def _renew_reports(self, peers: dict[str, Peer]) -> None:
        reports = self._reports
        for key, peer in peers.items():
            if key not in reports or reports[key].load is not peer.load:
                reports[key] = _Report.of(key, peer.load)

    def _matches(
        self, policy: DecodeScoreSpec, hashes: Sequence[bytes], now: float
    ) -> tuple[dict[str, int], Collection[str]]:
        if not hashes:
            return {}, ()
        self._recent.seconds = policy.recent_seconds
        if not policy.kv_events:
            sent = self._recent.match_all(hashes, now)
            return sent, sent
        matches = self._worker.blocks.match_all(hashes)
        for key, num_blocks in self._recent.match_all(hashes, now, _UNREPORTED_SECONDS).items():
            matches[key] = max(num_blocks, matches.get(key, 0))
        return matches, self._recent.match_all(hashes[:1], now)

    def _decide(
        self,
        policy: DecodeScoreSpec,
        spec: RequestSpec,
        hints: RouteHints,
        candidates: Sequence[DecodeCandidate],
    ) -> DecodeChoice | None:
        if hints.worker and all(c.key != hints.worker for c in candidates):
            raise RequestError(
                f"pdcluster.route.worker: {quoted(hints.worker)} takes no requests here: leave it "
                "out, or name one that is ready",
                status=503,
                param="pdcluster.route.worker",
                code="worker_unavailable",
            )
        if not candidates:
            return None
        request = RequestSize(spec.num_tokens, self._worker.block_size)
        return self._chooser.choose(
            policy, request, candidates, pinned=hints.worker, session=hints.session
        )

    def _charge(
        self, spec: RequestSpec, chosen: DecodeCandidate, report: object, routed: _Routed
    ) -> None:
        """Charge the request to its worker, at first with its prompt's other choices."""
        num_tokens = spec.num_tokens
        uncached_tokens = max(0, num_tokens - chosen.matched_blocks * self._worker.block_size)
        self._load.add(
            spec.request_id,
            chosen.key,
            report,
            Charges(1, uncached_tokens, self._worker.num_blocks(num_tokens)),
        )
        for request_id in routed.uncharged - {spec.request_id}:
            self._load.add(request_id, chosen.key, report, Charges(1, 0, 1))
        routed.uncharged.clear()


def _trace(decision: DecodeChoice, chosen: DecodeCandidate) -> None:
    lowest = sorted(decision.costs.items(), key=itemgetter(1))[:_TRACED_COSTS]
    add_event(
        "decode_worker",
        worker=decision.key or "here",
        rule=decision.rule,
        costs=" ".join(f"{key or 'here'}={cost:.2f}" for key, cost in lowest),
        matched_blocks=chosen.matched_blocks,
        num_requests=chosen.num_requests,
        prefill_tokens=chosen.prefill_tokens,
    )


def _reported(load: WorkerLoad, num_requests: int) -> Charges:
    waiting = load.waiting_tokens + load.credit_queue_tokens
    return Charges(num_requests, waiting, max(0, load.total_blocks - load.free_blocks))


def _candidate(
    key: str,
    charges: Charges,
    load: WorkerLoad,
    matched_blocks: int,
    is_recent: bool,
    *,
    is_self: bool = False,
    taint: float = 1.0,
) -> DecodeCandidate:
    return DecodeCandidate(
        key=key,
        num_requests=charges.num_requests,
        is_self=is_self,
        matched_blocks=matched_blocks,
        is_recent=is_recent,
        prefill_tokens=charges.prefill_tokens,
        decode_blocks=charges.decode_blocks,
        total_blocks=load.total_blocks,
        busy_ratio=load.busy_ratio,
        memory_bandwidth_ratio=load.memory_bandwidth_ratio,
        taint=taint,
    )
