"""Remote prefill in simulated time: a credit, blocks, the prompt at the prefill worker, its KV.

`serving.decode.broker` and `remote_prefill` do the same beside their connections.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from pdcluster_schema.policy import PolicyConfig
from pdcluster_simulator.events import SimulatedTime
from pdcluster_simulator.requests import EngineWork
from pdcluster_simulator.step_model import StepModel
from pdcluster_simulator.workers import ClusterWorker, PendingRequest
from pdcluster_worker.engine.request import Status
from pdcluster_worker.routing.batching import Grant
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.routing.offload import takes_length
from pdcluster_worker.routing.prefill_choice import (
    REQUESTING_HEADS,
    PrefillCandidate,
    choose_prefill,
)


@dataclass(frozen=True, slots=True)
class Network:
    """Links of the workers: each sends or receives one KV transfer at a time."""

    bytes_per_second: float
    latency_seconds: float
    kv_bytes: float  # of a token

    def send(
        self, source: ClusterWorker, target: ClusterWorker, num_tokens: int, now: float
    ) -> float:
        """Returns when the KV of so many tokens is there."""
        begin = max(now, source.link_free, target.link_free)
        end = begin + num_tokens * self.kv_bytes / self.bytes_per_second
        source.link_free = target.link_free = end
        return end + self.latency_seconds


class RemotePrefills:
    """Remote prefills of all decode workers of a cluster.

    prefills:    the prefill workers that take requests
    workers:     decode workers by key
    on_first:    called with a request when its first token is at its decode worker
    on_failed:   and a reason, where no engine can ever run it
    compute_locally: called with a request that no prefill worker takes
    """

    def __init__(
        self,
        queue: SimulatedTime,
        times: StepModel,
        network: Network,
        policy: PolicyConfig,
        draw: Random,
    ) -> None:
        self.prefills: Sequence[ClusterWorker] = ()
        self.workers: dict[str, ClusterWorker] = {}
        self.on_first: Callable[[PendingRequest], None]
        self.on_failed: Callable[[PendingRequest, str], None]
        self.compute_locally: Callable[[PendingRequest], None]
        self._queue, self._times, self._network = queue, times, network
        self._policy, self._draw = policy, draw

    # --- a credit ---------------------------------------------------------------------------------

    def begin(self, pending: PendingRequest) -> None:
        request, worker = pending.request, pending.worker
        worker.credit_queue.add(request.request_id, request.prompt_tokens, request.priority)
        worker.pending[request.request_id] = pending
        self.request_credits(worker)

    def request_credits(self, worker: ClusterWorker) -> None:
        """Ask prefill workers for credits for the heads of a worker's queue."""
        for request_id in worker.credit_queue.heads(REQUESTING_HEADS):
            pending = worker.pending.get(request_id)
            if pending is not None and pending.is_idle:
                self._request(pending)

    def _request(self, pending: PendingRequest) -> None:
        tokens = pending.request.prompt_tokens
        able = [
            each
            for each in self.prefills
            if takes_length(each.engine.settings.max_model_len, tokens)
        ]
        if not able:
            self._leave_queue(pending)
            self.compute_locally(pending)
            return
        ready = [
            each
            for each in able
            if each.ledger is not None and each.ledger.grants_at_once(self._cost(pending, each))
        ]
        if ready:
            self._take(pending, self._best(pending, ready))
            return
        pending.claimed = able
        for each in able:
            self._claim(pending, each)

    def on_joined(self, prefill: ClusterWorker) -> None:
        """Ask a new prefill worker for a credit too, for each request that waits for one."""
        for worker in self.workers.values():
            for pending in [*worker.pending.values()]:
                if pending.claimed and pending.prefill is None:
                    pending.claimed.append(prefill)
                    self._claim(pending, prefill)

    def on_draining(self, prefill: ClusterWorker) -> None:
        """It grants no more: what waits for it alone is requested of others."""
        _ledger(prefill).stop()
        for worker in self.workers.values():
            for pending in [*worker.pending.values()]:
                if prefill in pending.claimed and pending.prefill is None:
                    pending.claimed.remove(prefill)
                    _ledger(prefill).release(worker.key, pending.request.request_id)
            self.request_credits(worker)

    def _claim(self, pending: PendingRequest, prefill: ClusterWorker) -> None:
        request, cost = pending.request, self._cost(pending, prefill)
        granted = _ledger(prefill).claim(
            pending.worker.key, request.request_id, cost, request.priority
        )
        self._deliver(prefill, granted)

    def _take(self, pending: PendingRequest, prefill: ClusterWorker) -> None:
        """Claim a credit that is granted at once."""
        request = pending.request
        cost = self._cost(pending, prefill)
        granted = _ledger(prefill).claim(
            pending.worker.key, request.request_id, cost, request.priority
        )
        assert len(granted) == 1, "a credit was not granted though there was room"
        self._chosen(pending, prefill)

    def _deliver(self, prefill: ClusterWorker, grants: Sequence[Grant]) -> None:
        for grant in grants:
            self._queue.at(
                self._queue.now + self._times.hop_seconds, self._on_credit, (prefill, grant)
            )

    def _on_credit(self, credit: tuple[ClusterWorker, Grant]) -> None:
        prefill, grant = credit
        pending = self._pending_of(grant)
        if pending is None or pending.prefill is not None or prefill not in pending.claimed:
            self._deliver(prefill, _ledger(prefill).release(grant.peer, grant.request_id))
            return
        claimed, pending.claimed = pending.claimed, [prefill]
        self._chosen(pending, prefill)
        for each in claimed:
            if each is not prefill:
                self._deliver(each, _ledger(each).release(grant.peer, grant.request_id))

    def _pending_of(self, grant: Grant) -> PendingRequest | None:
        worker = self.workers.get(grant.peer)
        return None if worker is None else worker.pending.get(grant.request_id)

    def _best(self, pending: PendingRequest, granted: Sequence[ClusterWorker]) -> ClusterWorker:
        if len(granted) == 1:
            return granted[0]
        candidates = [
            PrefillCandidate(each.key, self._matched(pending, each), each.load.waiting_tokens, 0.0)
            for each in granted
        ]
        key = choose_prefill(self._policy.prefill_score, candidates, self._draw)
        return next(each for each in granted if each.key == key)

    def _cost(self, pending: PendingRequest, prefill: ClusterWorker) -> int:
        matched = self._matched(pending, prefill) if pending.request.hashes else 0
        return max(1, pending.request.prompt_tokens - matched)

    def _matched(self, pending: PendingRequest, prefill: ClusterWorker) -> int:
        hashes, engine = pending.request.hashes, prefill.engine
        if not hashes or not engine.settings.prefix_caching:
            return 0
        matched = engine.pool.prefix_cache.match(hashes, len(hashes))
        return min(pending.request.prompt_tokens, len(matched) * engine.settings.block_size)

    # --- blocks -----------------------------------------------------------------------------------

    def _chosen(self, pending: PendingRequest, prefill: ClusterWorker) -> None:
        pending.prefill = prefill
        pending.worker.engine.post(
            lambda: self._receive(pending), lambda: self._received_blocks(pending)
        )

    def _receive(self, pending: PendingRequest) -> None:
        if pending.has_left:
            return
        work = pending.work = EngineWork.of(pending.request, self._queue.now)
        work.peer, pending.needed_blocks, pending.fault = pending, 0, ""
        try:
            pending.needed_blocks = pending.worker.engine.receive(work)
        except ValueError as e:
            pending.fault = str(e)

    def _received_blocks(self, pending: PendingRequest) -> None:
        """The engine has answered: go on at the prefill worker, or give its credit back."""
        worker, prefill, work = pending.worker, pending.prefill, pending.work
        if pending.has_left or prefill is None or work is None:
            return
        if pending.fault:
            self._give_back(pending)
            self._leave_queue(pending)
            self.on_failed(pending, pending.fault)
            return
        if pending.needed_blocks:
            self._give_back(pending)
            worker.short_of_blocks.append(pending)
            self.on_freed(worker)  # some may have come free meanwhile
            return
        self._leave_queue(pending)
        now, request = self._queue.now, pending.request
        request.cached_tokens = work.num_computed_tokens
        work.last_token = now
        _ledger(prefill).start(worker.key, request.request_id)
        self._queue.at(now + self._times.hop_seconds, self._prefill, pending)

    def _give_back(self, pending: PendingRequest) -> None:
        prefill, pending.prefill, pending.claimed = pending.prefill, None, []
        if prefill is not None:
            self._deliver(
                prefill,
                _ledger(prefill).release(pending.worker.key, pending.request.request_id),
            )

    def on_freed(self, worker: ClusterWorker) -> None:
        """Try again what was short of blocks."""
        if not worker.short_of_blocks:
            return
        available = worker.engine.pool.num_available
        fitting = [each for each in worker.short_of_blocks if each.needed_blocks <= available]
        if fitting:
            worker.short_of_blocks = [
                each for each in worker.short_of_blocks if each.needed_blocks > available
            ]
            for each in fitting:
                each.needed_blocks = 0
            self._queue.at(self._queue.now, self._again, worker)

    def _again(self, worker: ClusterWorker) -> None:
        self.request_credits(worker)

    def _leave_queue(self, pending: PendingRequest) -> None:
        worker, request_id = pending.worker, pending.request.request_id
        worker.credit_queue.discard(request_id)
        worker.pending.pop(request_id, None)
        if worker.credit_queue.num_requests:
            self._queue.at(self._queue.now, self._again, worker)

    def drop(self, pending: PendingRequest) -> None:
        """Forget a request without a first token, wherever it is."""
        worker, request_id = pending.worker, pending.request.request_id
        claimed, prefill, work = pending.claimed, pending.prefill, pending.prefill_work
        pending.claimed, pending.prefill, pending.prefill_work = [], None, None
        if pending in worker.short_of_blocks:
            worker.short_of_blocks.remove(pending)
        known = claimed if prefill is None or prefill in claimed else [*claimed, prefill]
        for each in known:
            self._deliver(each, _ledger(each).release(worker.key, request_id))
            self._deliver(each, _ledger(each).finish(worker.key, request_id))
        if prefill is not None and work is not None:
            prefill.num_active -= 1
            prefill.engine.post(lambda: prefill.engine.abort(work))
        self._leave_queue(pending)

    # --- the prompt, and its KV -------------------------------------------------------------------

    def _prefill(self, pending: PendingRequest) -> None:
        prefill = pending.prefill
        if prefill is None:  # it was dropped meanwhile
            return
        request, size = pending.request, prefill.engine.settings.block_size
        num_blocks = -(-request.prompt_tokens // size) - request.cached_tokens // size
        work = EngineWork.of(request, self._queue.now, num_blocks)
        work.peer, pending.prefill_work = pending, work
        prefill.num_active += 1
        prefill.engine.post(lambda: prefill.engine.submit(work))

    def on_computed(self, work: EngineWork, num_tokens: int) -> None:
        """A chunk is computed: its full blocks are on their way, all of it with the last one."""
        pending: PendingRequest = work.peer
        if pending.prefill is None:
            return
        size = pending.prefill.engine.settings.block_size
        done = min(work.num_computed_tokens, work.num_prompt_tokens)
        whole = done if done == work.num_prompt_tokens else done // size * size
        begin = max(work.sent_tokens, pending.request.cached_tokens)
        if whole > begin:
            self._network.send(pending.prefill, pending.worker, whole - begin, self._queue.now)
            work.sent_tokens = whole

    def on_first_token(self, work: EngineWork) -> None:
        """The prefill worker has made the first token, and sends the rest of the KV."""
        pending: PendingRequest = work.peer
        prefill, now = pending.prefill, self._queue.now
        if prefill is None:
            return
        pending.queue_seconds = max(0.0, (work.scheduled_seconds or 0.0) - pending.sent_at)
        request_id, key = pending.request.request_id, pending.worker.key
        self._deliver(prefill, _ledger(prefill).finish(key, request_id))
        self._queue.at(now + self._times.hop_seconds, self._first, pending)
        if pending.request.output_tokens > 1:
            end = max(now, prefill.link_free) + self._network.latency_seconds
            self._queue.at(end, self._arrived, pending)

    def _first(self, pending: PendingRequest) -> None:
        if pending.has_left:
            return
        if pending.work is not None:
            pending.work.last_token = self._queue.now
        if pending.request.output_tokens == 1:
            self._release_prefill(pending)
            pending.worker.engine.post(lambda: self._unused(pending))
        self.on_first(pending)

    def _unused(self, pending: PendingRequest) -> None:
        if pending.work is not None and pending.work.status is Status.RECEIVING:
            pending.worker.engine.release(pending.work)

    def _arrived(self, pending: PendingRequest) -> None:
        """All KV is acknowledged: the prefill engine sees it at its next step, and says so."""
        self._release_prefill(pending, lambda: self._done(pending))

    def _done(self, pending: PendingRequest) -> None:
        hop, engine = self._times.hop_seconds, pending.worker.engine
        self._queue.at(
            self._queue.now + hop, lambda _: engine.post(lambda: self._received(pending))
        )

    def _received(self, pending: PendingRequest) -> None:
        work = pending.work
        if work is not None and work.status is Status.RECEIVING:
            pending.worker.engine.received(work)

    def _release_prefill(
        self, pending: PendingRequest, answer: Callable[[], None] | None = None
    ) -> None:
        prefill, work = pending.prefill, pending.prefill_work
        if prefill is None or work is None:
            return
        prefill.num_active -= 1
        pending.prefill_work = None
        if work.status is Status.SENDING:
            prefill.engine.post(lambda: prefill.engine.release(work), answer)


def _ledger(worker: ClusterWorker) -> CreditLedger:
    assert worker.ledger is not None
    return worker.ledger
