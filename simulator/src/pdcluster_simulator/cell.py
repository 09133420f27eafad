"""One simulated PDCluster: from a request's arrival to its last token."""

from collections.abc import Sequence
from random import Random

from pdcluster_schema.policy import PolicyConfig
from pdcluster_simulator.admission import QUEUE_FULL, Admitted, admit, may_displace, shed_after
from pdcluster_simulator.events import SimulatedTime
from pdcluster_simulator.ingress import Members, SimulatedIngress
from pdcluster_simulator.remote_prefill import Network, RemotePrefills
from pdcluster_simulator.requests import EngineWork, RequestOutcome, SimulatedRequest
from pdcluster_simulator.results import Recorder
from pdcluster_simulator.step_model import StepModel
from pdcluster_simulator.workers import ClusterWorker, PendingRequest, WorkerState
from pdcluster_worker.routing.offload import OffloadFacts, decide, length_threshold, takes_length
from pdcluster_worker.routing.qos.load_shedding import offloads_at_once, tier_of
from pdcluster_worker.routing.ttft import Side

REPORT_SECONDS = 1.0


class Cell:
    """block_size: of the decode engines.  has_priorities: some requests have another than normal"""

    def __init__(
        self,
        queue: SimulatedTime,
        policy: PolicyConfig,
        times: StepModel,
        network: Network,
        recorder: Recorder,
        *,
        draw: Random,
        block_size: int,
        has_priorities: bool = False,
    ) -> None:
        self.queue, self.policy, self.times, self.recorder = queue, policy, times, recorder
        self.workers: dict[str, ClusterWorker] = {}
        self.members = Members()
        self.remote = RemotePrefills(queue, times, network, policy, draw)
        self.remote.on_first = self._on_remote_first
        self.remote.on_failed = self._on_failed
        self.remote.compute_locally = self._compute_locally
        self.ingresses: list[SimulatedIngress] = []
        self.is_first_ingress_alone = False
        self._draw, self._block_size = draw, block_size
        self._has_priorities = has_priorities
        self._running: dict[SimulatedRequest, PendingRequest] = {}
        self._ingress_of: dict[SimulatedRequest, SimulatedIngress] = {}
        self._decodes: list[ClusterWorker] = []
        # Of the last reports: requests and tokens that wait for credits, and at prefill workers.
        self._sums = [0, 0, 0, 0]

    # --- members ----------------------------------------------------------------------------------

    def add(self, worker: ClusterWorker) -> None:
        self.workers[worker.key] = worker
        self.place(worker)
        phase = self._draw.random() * REPORT_SECONDS
        self.queue.at(self.queue.now + phase, self._report, worker)

    def place(self, worker: ClusterWorker) -> None:
        """Know a worker by the role that it has."""
        if worker.role == "prefill":
            self.remote.workers.pop(worker.key, None)
        else:
            self.remote.workers[worker.key] = worker

    def renew(self, num_routers: int = 0) -> None:
        """Follow the workers' states."""
        ready = [each for each in self.workers.values() if each.is_ready]
        before = set(self.remote.prefills)
        self.remote.prefills = [each for each in ready if each.role == "prefill"]
        self._decodes = [each for each in ready if each.role != "prefill"]
        self.members.renew(self._decodes)
        self._renew_sums()
        known = {each.worker: each for each in self.ingresses if each.worker is not None}
        if num_routers and not self.ingresses:
            self.ingresses = [self._ingress(None) for _ in range(num_routers)]
        elif not num_routers:
            # the Service leads to pods of decode workers, whatever role these have
            pods = [each for each in self._decodes if each.home[0] != "prefill"]
            self.ingresses = [known.get(each) or self._ingress(each) for each in pods]
        for worker in self.remote.prefills:
            if worker not in before:
                self.remote.on_joined(worker)

    def _ingress(self, worker: ClusterWorker | None) -> SimulatedIngress:
        return SimulatedIngress(worker, self.members, self.policy, self._block_size, self._draw)

    def remove(self, worker: ClusterWorker) -> None:
        worker.state = WorkerState.GONE
        if self.workers.pop(worker.key, None) is not None:
            self.recorder.num_preemptions += worker.engine.scheduler.num_preemptions
        self.remote.workers.pop(worker.key, None)

    def _report(self, worker: ClusterWorker) -> None:
        if worker.state is WorkerState.GONE:
            return
        before = _parts(worker)
        worker.report()
        if worker.is_ready:
            for index, (old, new) in enumerate(zip(before, _parts(worker), strict=True)):
                self._sums[index] += new - old
            if worker.role != "prefill":
                self.members.reported(worker)
        if worker.engine.settings.prefix_caching:
            events = worker.engine.pool.prefix_cache.take_events()
            if events is not None and worker.role != "prefill":
                self.members.prefixes.apply(worker.key, events.stored, events.removed)
        self.queue.at(self.queue.now + REPORT_SECONDS, self._report, worker)

    def _renew_sums(self) -> None:
        parts = [_parts(each) for each in (*self._decodes, *self.remote.prefills)]
        self._sums = [sum(each) for each in zip(*parts, strict=True)] or [0, 0, 0, 0]

    # --- a request --------------------------------------------------------------------------------

    def arrive(self, request: SimulatedRequest) -> None:
        self.recorder.num_arrived += 1
        if not self.ingresses:
            self._refuse(request, "no_worker")
            return
        first = self.is_first_ingress_alone
        ingress = self.ingresses[0] if first else self._draw.choice(self.ingresses)
        worker = ingress.choose(request, self.queue.now)
        if worker is None:
            self._refuse(request, "no_worker")
            return
        pending = PendingRequest(request, worker)
        self._running[request] = pending
        self._ingress_of[request] = ingress
        hop = 0.0 if worker is ingress.worker else self.times.hop_seconds
        self.queue.at(self.queue.now + self.times.request_seconds + hop, self._dispatch, pending)

    def _dispatch(self, pending: PendingRequest) -> None:
        request, worker = pending.request, pending.worker
        admitted = admit(self.policy, worker, request)
        if admitted == QUEUE_FULL and self._displaces(pending):
            admitted = Admitted(request.output_tokens)
        if isinstance(admitted, str):
            self._forget(pending)
            self._refuse(request, admitted)
            return
        request.output_tokens = admitted.output_tokens
        worker.num_active += 1
        worker.num_waiting += 1
        pending.is_waiting = True
        worker.waiting_tokens += request.prompt_tokens
        worker.counted.requests += 1
        worker.counted.prompt_tokens += request.prompt_tokens
        if self._has_priorities:
            worker.meter.joined()
        if (patience := shed_after(self.policy, request)) is not None:
            self.queue.at(self.queue.now + patience, self._too_long, pending)
        is_remote = not admitted.is_local and self._goes(pending)
        request.is_remote = is_remote
        if is_remote:
            self._sent(pending, "remote")
            self.remote.begin(pending)
        else:
            self._compute_locally(pending)

    def _displaces(self, pending: PendingRequest) -> bool:
        """Shed the last request of low priority for one of high priority."""
        low = [
            each
            for each in self._running.values()
            if each.worker is pending.worker and each.is_waiting and each.request.priority > 0
        ]
        if not low or not may_displace(self.policy, pending.request):
            return False
        self._shed(low[-1], "displaced")
        return True

    def _too_long(self, pending: PendingRequest) -> None:
        """Shed what has waited too long; alone it makes room for no other."""
        if not pending.is_waiting:
            return
        if pending.worker.num_waiting > 1:
            self._shed(pending, "waited_too_long")
        elif (patience := shed_after(self.policy, pending.request)) is not None:
            self.queue.at(self.queue.now + patience, self._too_long, pending)

    def _shed(self, pending: PendingRequest, code: str) -> None:
        engine, work = pending.worker.engine, pending.work
        self.remote.drop(pending)
        if work is not None:
            engine.post(lambda: engine.abort(work))
        self._on_failed(pending, code)

    def _goes(self, pending: PendingRequest) -> bool:
        """Decide for a prefill worker; see `serving.decode.offload_decider`."""
        worker, request, policy = pending.worker, pending.request, self.policy.offload
        num_able = len(self.remote.prefills)
        if worker.role != "decode" or not num_able:
            return False
        facts = self._facts(pending)
        now, gpu = self.queue.now, worker.gpu
        pending.uncached_tokens = facts.uncached_tokens
        pending.num_workers = num_able
        if offloads_at_once(self.policy, tier_of(request.priority), facts.uncached_tokens):
            return True
        threshold = length_threshold(policy, gpu)
        if policy.policy == "sloFeedback":
            threshold = worker.feedback.threshold_for(
                facts.uncached_tokens, policy.slo_feedback, threshold, now
            )
        elif policy.policy == "measured":
            facts = worker.estimates.known(facts, now, others=pending.others, num_workers=num_able)
        verdict = decide(policy, facts, threshold)
        if policy.policy == "measured" and facts.uncached_tokens >= policy.min_offload_length:
            verdict = worker.estimates.or_probe(verdict, now)
        return verdict.is_remote and self._is_taken(request.prompt_tokens)

    def _is_taken(self, num_tokens: int) -> bool:
        return any(
            takes_length(each.engine.settings.max_model_len, num_tokens)
            for each in self.remote.prefills
        )

    def _facts(self, pending: PendingRequest) -> OffloadFacts:
        worker, request = pending.worker, pending.request
        own, queue, settings = worker.load, worker.credit_queue, worker.engine.settings
        cached = 0
        if request.hashes and settings.prefix_caching:
            limit = (request.prompt_tokens - 1) // settings.block_size
            matched = worker.engine.pool.prefix_cache.match(request.hashes, limit)
            cached = len(matched) * settings.block_size
        requests, tokens, waiting, waiting_tokens = self._sums
        num_short, short_tokens = worker.waiting_for_blocks
        own_tokens = queue.num_tokens - short_tokens
        pending.others = tokens - own.credit_queue_tokens + own_tokens + waiting_tokens
        to_move = request.prompt_tokens - cached
        return OffloadFacts(
            prompt_tokens=request.prompt_tokens,
            cached_tokens=cached,
            prefill_queue=(
                requests - own.credit_queue_requests + queue.num_requests - num_short + waiting
            ),
            decode_active=worker.num_decoding,
            decode_ratio=1.0 - worker.engine.num_free_blocks / settings.num_blocks,
            transfer_seconds=worker.link_rates.seconds("prefill", to_move),
        )

    def _sent(self, pending: PendingRequest, side: str) -> None:
        pending.sent_at = self.queue.now
        if self.policy.offload.policy == "measured":
            pending.worker.estimates.sent(
                "remote" if side == "remote" else "local",
                pending.request.request_id,
                pending.uncached_tokens,
                self.queue.now,
                others=pending.others if side == "remote" else 0,
                num_workers=pending.num_workers if side == "remote" else 1,
            )

    def _compute_locally(self, pending: PendingRequest) -> None:
        pending.request.is_remote = False
        self._sent(pending, "local")
        work = pending.work = EngineWork.of(pending.request, self.queue.now)
        work.peer = pending
        engine = pending.worker.engine
        engine.post(lambda: engine.submit(work))

    # --- its tokens -------------------------------------------------------------------------------

    def on_local_first(self, work: EngineWork) -> None:
        pending: PendingRequest = work.peer
        if pending.has_left:  # the engine has not read yet that it was shed
            return
        pending.request.cached_tokens = work.num_cached_tokens
        began = work.scheduled_seconds
        seconds = None if began is None else self.queue.now - began
        pending.queue_seconds = max(0.0, (began or 0.0) - pending.sent_at)
        self._first(pending, "local", seconds)

    def _on_remote_first(self, pending: PendingRequest) -> None:
        self._first(pending, "remote", None)
        if pending.request.output_tokens == 1:
            self._end(pending)

    def _first(self, pending: PendingRequest, side: str, seconds: float | None) -> None:
        request, worker, now = pending.request, pending.worker, self.queue.now
        pending.is_waiting = False
        ingress = self._ingress_of[request]
        ingress.on_first_token(request, worker)
        hop = 0.0 if ingress.worker is worker else self.times.hop_seconds
        request.first = now + self.times.answer_seconds + hop
        worker.num_waiting -= 1
        worker.waiting_tokens -= request.prompt_tokens
        worker.num_decoding += 1
        if self._has_priorities:
            worker.meter.started(request.prompt_tokens)
        policy, took = self.policy.offload.policy, now - pending.sent_at
        uncached = request.prompt_tokens - request.cached_tokens
        place: Side = "remote" if side == "remote" else "local"
        if policy == "sloFeedback":
            worker.feedback.first_token(place, uncached, took, now)
        elif policy == "measured":
            worker.estimates.first_token(place, request.request_id, uncached, seconds, now)
        self.recorder.on_first(request, worker, pending.queue_seconds)

    def on_last(self, work: EngineWork) -> None:
        pending: PendingRequest = work.peer
        pending.work = work.peer = None  # no cycle is left
        if not pending.has_left:
            self._end(pending)

    def _end(self, pending: PendingRequest) -> None:
        request, worker, now = pending.request, pending.worker, self.queue.now
        request.end = now + self.times.answer_seconds
        request.num_tokens = request.output_tokens
        request.outcome = RequestOutcome.COMPLETE
        worker.num_decoding -= 1
        worker.num_active -= 1
        if self._has_priorities:
            worker.meter.left(has_started=True)
        if self.policy.offload.policy == "sloFeedback" and request.output_tokens > 1:
            seconds = (request.end - request.first) / (request.output_tokens - 1)
            worker.feedback.finished(seconds, now)
        self._forget(pending)
        self.recorder.on_end(request, worker)

    def _forget(self, pending: PendingRequest) -> None:
        pending.has_left = True
        self._running.pop(pending.request, None)
        self._ingress_of.pop(pending.request).on_end(pending.request, pending.worker)

    def _on_failed(self, pending: PendingRequest, reason: str) -> None:
        worker, request = pending.worker, pending.request
        worker.num_active -= 1
        worker.num_waiting -= 1
        pending.is_waiting = False
        worker.waiting_tokens -= request.prompt_tokens
        if self._has_priorities:
            worker.meter.left(has_started=False)
        self._forget(pending)
        self._refuse(request, reason)

    def on_engine_failed(self, work: EngineWork, reason: str) -> None:
        self._on_failed(work.peer, reason)

    def _refuse(self, request: SimulatedRequest, reason: str) -> None:
        request.outcome, request.refusal, request.end = (
            RequestOutcome.REFUSED,
            reason,
            self.queue.now,
        )
        self.recorder.on_end(request, None)

    def cut(self, worker: ClusterWorker) -> int:
        """End all requests of a worker whose drain has taken too long; returns their number."""
        found = [each for each in self._running.values() if each.worker is worker]
        for pending in found:
            self._forget(pending)
            request = pending.request
            request.outcome, request.end = RequestOutcome.CUT, self.queue.now
            self.recorder.on_end(request, worker)
        return len(found)


def _parts(worker: ClusterWorker) -> Sequence[int]:
    load = worker.load
    if worker.role == "prefill":
        return 0, 0, load.num_waiting, max(load.credit_tokens, load.waiting_tokens)
    return load.credit_queue_requests, load.credit_queue_tokens, 0, 0
