"""The engine: messages and transfer events in, one step of the model, messages out.

Nothing here waits, and time comes from the clock that is passed in.  Guarantees that a request's
blocks are released exactly once whatever ends it, and that a bad request fails alone.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

from pdcluster_worker.engine.adapters import Adapters
from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.block_table import BlockTables, refusal
from pdcluster_worker.engine.in_flight import InFlightSteps
from pdcluster_worker.engine.kv_tiers import KVTiers
from pdcluster_worker.engine.pool_audit import PoolAuditor
from pdcluster_worker.engine.ports import (
    BlocksSent,
    Drafter,
    DraftSamples,
    Fenced,
    ModelRunner,
    Sample,
    SendEnded,
    TransferEvent,
    Transport,
)
from pdcluster_worker.engine.prefill_delayer import PrefillDelayer
from pdcluster_worker.engine.read_ahead import ReadAhead
from pdcluster_worker.engine.receiving import Receiver, RemoteKV, random_epoch
from pdcluster_worker.engine.request import (
    EngineRequest,
    Scheduled,
    Status,
    check_stop,
    ends_by_length,
)
from pdcluster_worker.engine.scheduler.base import GrammarQueue, Schedule
from pdcluster_worker.engine.scheduler.policies import make_scheduler
from pdcluster_worker.engine.sending import Sender
from pdcluster_worker.engine.speculation import Speculation
from pdcluster_worker.engine.stats import Reporter, failure_message, token_message
from pdcluster_worker.engine.tier_ports import NO_TIERS, KVTierIO
from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.adapters import LoadAdapter, UnloadAdapter
from pdcluster_worker.messages.engine import EngineInput, EngineOutput, RequestFailed
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget

logger = logging.getLogger(__name__)


class EngineCore:
    """All requests of one engine.  Every method is called from one thread."""

    def __init__(
        self,
        settings: EngineSettings,
        runner: ModelRunner,
        transport: Transport,
        clock: Callable[[], float],
        new_epoch: Callable[[], bytes] = random_epoch,
        *,
        delayer: PrefillDelayer | None = None,
        drafter: Drafter | None = None,
        tiers: KVTierIO = NO_TIERS,
    ) -> None:
        self.pool = BlockPool(settings.num_blocks)
        self._settings = settings
        self._runner = runner
        self._transport = transport
        self._clock = clock
        self._tables = BlockTables(settings, self.pool)
        self._scheduler = make_scheduler(settings, self._tables)
        self._receiver = Receiver(settings, self._tables, transport, new_epoch)
        self._sender = Sender(settings.block_size, self.pool, transport)
        self._grammar_queue = GrammarQueue(runner.grammars, self._scheduler)
        self._remote_kv = RemoteKV(self._receiver, self._grammar_queue, clock, self._end)
        self._in_flight = InFlightSteps(runner, settings.max_model_len, clock)
        self._delayer = delayer
        self._tiers = KVTiers(self.pool, tiers, clock)
        self._reads = ReadAhead(self._scheduler, self._tiers, clock) if tiers.tiers else None
        self._requests: dict[str, EngineRequest] = {}
        # Those that have ended while a step in flight writes their blocks.
        self._leaving: set[EngineRequest] = set()
        self._outbox: list[EngineOutput] = []
        self._stalled = False  # the last schedule was empty and nothing has happened since
        self._reporter = Reporter(
            scheduler=self._scheduler,
            receiver=self._receiver,
            sender=self._sender,
            grammar_queue=self._grammar_queue,
            delayer=delayer,
            read_ahead=self._reads,
            failed_rows=self._in_flight.num_failed,
            clock=clock,
        )
        self._speculation: Speculation | None = None
        if drafter is not None:
            counts, looks_ahead = self._reporter.counters, runner.depth > 1
            self._speculation = Speculation(
                settings, self._tables, drafter, clock, counts, looks_ahead=looks_ahead
            )
        self._adapters = Adapters(settings.adapters, runner.adapters)
        self._audit = PoolAuditor(self.pool, self._held_blocks, clock)

    @property
    def has_work(self) -> bool:
        """False while every request waits for blocks, a transfer or a message."""
        return len(self._in_flight) > 0 or (self._scheduler.num_requests > 0 and not self._stalled)

    @property
    def num_steps(self) -> int:
        return self._reporter.counters.num_steps

    def next_wake_seconds(self) -> float | None:
        """In how many seconds a turn is due though nothing happens; None when never."""
        now = self._clock()
        due = [self._receiver.next_overdue_seconds(now)]
        due.append(None if self._reads is None else self._reads.next_seconds)
        if not self.has_work:
            due.append(self._delayer.next_pass_seconds(now) if self._delayer is not None else None)
            due.append(self._audit.next_seconds(now))
        return min((seconds for seconds in due if seconds is not None), default=None)

    def handle(self, message: EngineInput) -> None:
        """Take one message; its outputs come out of the next `step`."""
        self._touch()
        self._reporter.counters.num_inputs += 1
        match message:
            case messages.Submit(spec=spec):
                if (request := self._accept(spec, num_more=0)) is not None:
                    self._grammar_queue.enter(request)
            case messages.Receive(spec=spec):
                if (request := self._accept(spec, num_more=1)) is not None:
                    self._read_or_reserve(request)
            case messages.ReceiveDone():
                self._remote_kv.done(message)
            case messages.Fetch(request_id=request_id):
                reason = "this engine's KV is written by its peers, and it fetches none"
                self._outbox.append(messages.FetchFailed(request_id, reason))
            case messages.ReceiveFailed():
                self._remote_kv.failed(message)
            case messages.Prefill(spec=spec, target=target):
                self._prefill(spec, target)
            case messages.Abort(request_id=request_id):
                self._abort(request_id)
            case _:
                self._handle_control(message)

    def _handle_control(self, message: EngineInput) -> None:
        match message:
            case messages.DeferGroups(groups=groups, evicts=evicts):
                self._scheduler.defer(groups, evicts=evicts)
            case LoadAdapter() | UnloadAdapter():
                self._outbox += self._adapters.handle(message)
            case messages.AskSnapshot():
                self.pool.prefix_cache.begin_snapshot()

    def step(self) -> list[EngineOutput]:
        """One turn; returns all messages to send.  Raises EngineBrokenError."""
        # 1. Take what the transport and the grammar compiler have finished.
        # 2. Complete the step in flight if its requests may lose blocks; preempt; read from tiers.
        # 3. Schedule: choose the tokens of each request, and take blocks for them.
        # 4. Report requests that failed or were preempted, count those that start, send the full
        #    blocks that these have by a prefix hit; put drafts behind decodes.
        # 5. Submit the batch to the model.
        # 6. Complete steps, the oldest first, until one more may be in flight; all if nothing was
        #    submitted: append tokens, find ends, send finished KV blocks, release.
        # 7. Take and drop adapters; report statistics and changes of the prefix cache.
        started = self._clock()
        self._take_events()
        self._make_way()
        if self._reads is not None and self._reads.advance(self._reporter.counters):
            self._touch()
        delayer, scheduler = self._delayer, self._scheduler
        schedule = scheduler.schedule() if delayer is None else delayer.schedule(scheduler, started)
        self._begin(schedule, started)
        if self._speculation is not None:
            self._speculation.extend(schedule, len(self._scheduler.running))
        if schedule.items:
            self._in_flight.submit(schedule.batch, started)
        self._stalled = not schedule.progressed and not self._in_flight
        while self._in_flight.is_full or (self._in_flight and not schedule.items):
            self._complete()
        if self._reads is not None:
            self._reads.save()
        if delayer is not None:
            delayer.finish(len(schedule.admitted), scheduler.num_requests == 0, started)
        if self._adapters.loader is not None:
            self._outbox += self._adapters.settle(chain(self._requests.values(), self._leaving))
        self._outbox += self._reporter.report(idle=not self.has_work)
        outbox, self._outbox = self._outbox, []
        return outbox

    def check_when_idle(self) -> None:
        """Check a slice of the pool if no step is due; for after a step's output is sent."""
        if not self.has_work and self._audit.next_seconds(self._clock()) == 0.0:
            self._receiver.check()
            self._audit.turn()

    def check(self) -> None:
        """Assert that the pool's references are those of live requests and sends; O(num_blocks)."""
        self.pool.check()
        self.pool.check_blocks(range(self.pool.num_blocks), Counter(self._held_blocks()))
        self._receiver.check()
        self._tiers.check()

    def _read_or_reserve(self, request: EngineRequest) -> None:
        if self._reads is None or not self._reads.begin(request, self._read_or_reserve):
            self._reserve(request)

    def _reserve(self, request: EngineRequest) -> None:
        num_tokens = self._scheduler.num_admission_tokens(request)
        answer = self._receiver.receive(request, num_tokens, self._scheduler.num_reserved_blocks)
        self._outbox.append(answer)
        if isinstance(answer, messages.ReceiveReady):
            self._reporter.counters.count_request(request)
            self._grammar_queue.add(request)
        else:
            self._end(request)

    def _prefill(self, spec: RequestSpec, target: TransferTarget) -> None:
        if (request := self._accept(spec, num_more=0, target=target)) is None:
            return
        # A request that ends at its first token, whatever that is, moves no KV.
        if not ends_by_length(request, self._settings.max_model_len, num_more=1):
            self._sender.begin(request, target)
        self._grammar_queue.enter(request)

    def _abort(self, request_id: str) -> None:
        if (request := self._requests.get(request_id)) is not None:
            logger.info("aborted request=%s status=%s", request_id, request.status.value)
            self._end(request)

    def _accept(
        self, spec: RequestSpec, num_more: int, target: TransferTarget | None = None
    ) -> EngineRequest | None:
        """A new live request; None for a repeated id, and one that can never run is answered."""
        if spec.request_id in self._requests:
            logger.warning("ignored a repeated request id request=%s", spec.request_id)
            return None
        request = EngineRequest.from_spec(spec, self._clock(), target)
        if request.adapter and (failed := self._adapters.refusal(request)) is not None:
            self._outbox.append(failed)
            return None
        reason = refusal(request, self._settings, num_more)
        if reason is None and target is not None and target.epoch in self._sender:
            reason = "target.epoch is in use by another request: every transfer needs a fresh one"
        if reason is not None:
            self._outbox.append(RequestFailed(request.request_id, reason, is_refusal=True))
            return None
        self._requests[request.request_id] = request
        return request

    def _held_blocks(self) -> Iterator[int]:
        tables = [request.block_table for request in chain(self._requests.values(), self._leaving)]
        return chain(self._sender.held(), self._tiers.held(), chain.from_iterable(tables))

    # --- transfer events ---

    def _on_transfer(self, event: TransferEvent) -> None:
        match event:
            case BlocksSent():
                if (done := self._sender.sent(event)) is not None:
                    self._outbox.append(done)
                    self._end(self._requests[done.request_id])
            case SendEnded():
                if (request := self._sender.ended(event)) is not None:
                    self._outbox.append(messages.PrefillFailed(request.request_id, event.reason))
                    self._end(request)
            case Fenced():
                if (received := self._remote_kv.fenced(event)) is not None:
                    self._outbox.append(received)

    # --- a step ---

    def _take_events(self) -> None:
        for event in self._transport.poll():
            self._touch()
            self._on_transfer(event)
        for request, error in self._grammar_queue.settle():
            self._touch()
            if error is not None:
                self._fail(request, error, is_refusal=True)

    def _make_way(self) -> None:
        if self._in_flight and (
            self._scheduler.preemption_victim is not None
            or not self._tables.has_blocks_for_next(
                [*self._scheduler.computing, *self._scheduler.ready]
            )
        ):
            # Blocks may be taken from a request now, and the step in flight writes them.
            self._complete()
        self._scheduler.preempt_for_priority()

    def _begin(self, schedule: Schedule, now: float) -> None:
        for request, reason in schedule.failed:
            self._outbox.append(RequestFailed(request.request_id, reason))
            self._end(request)
        own = [each for each in schedule.preempted if each.target is None]
        self._outbox += [messages.Preempted(each.request_id) for each in own]
        for request in schedule.started:
            self._reporter.counters.count_request(request)
        for request in schedule.newly_running:
            if request.scheduled_seconds is None:
                request.scheduled_seconds = now
            self._write_full(request, now)

    def _complete(self) -> None:
        completed = self._in_flight.complete()
        tokens: list[Token] = []
        for item, outcome in completed.outcomes:
            if isinstance(outcome, Exception):
                self._fail(item.request, outcome)
                continue
            assert (outcome is not None) == item.samples, (
                f"the runner's answer for {item.request.request_id} does not fit its tokens"
            )
            self._tables.advance(item.request, item.num_known_tokens)
            if outcome is None:
                self._write_full(item.request, completed.completed_seconds)
            else:
                tokens += self._append(item, outcome, completed.completed_seconds)
        for request in completed.gone:
            self._leaving.discard(request)
            self._release(request)
        if tokens:
            self._outbox.append(messages.Tokens(tokens))
        self._reporter.changed = True
        work, times = completed.step.work, self._in_flight.times(completed)
        self._reporter.counters.count_step(work, times, len(tokens))
        self._scheduler.completed(work.num_tokens, times.step)
        if self._speculation is not None:
            self._speculation.completed(completed.step, times.model)

    def _append(self, item: Scheduled, outcome: Sample | DraftSamples, now: float) -> list[Token]:
        if isinstance(outcome, Sample):
            return [self._sampled(item.request, outcome, now)]
        tokens: list[Token] = []
        for sample in outcome.samples:
            if tokens:
                self._tables.advance(item.request, 1)  # of a draft that was accepted
            tokens.append(self._sampled(item.request, sample, now))
            if tokens[-1].finish_reason is not None:
                break
        if self._speculation is not None:
            self._speculation.settle(item, num_accepted=len(tokens) - 1)
        return tokens

    def _sampled(self, request: EngineRequest, sample: Sample, now: float) -> Token:
        request.tokens.append(sample.token_id)
        finish = check_stop(request, self._settings.max_model_len)
        if finish is not None:
            self._end(request)
        elif request.target is not None:
            self._sender.write_rest(request.target, now)
            self._leave(request)
            request.status = Status.SENDING
        return token_message(request, sample, finish, now)

    def _write_full(self, request: EngineRequest, now: float) -> None:
        if request.target is not None and request.target.epoch in self._sender:
            self._sender.write_full(request, request.target, now)

    def _fail(self, request: EngineRequest, error: Exception, *, is_refusal: bool = False) -> None:
        self._outbox.append(failure_message(request, error, is_refusal=is_refusal))
        self._end(request)

    def _end(self, request: EngineRequest) -> None:
        """Forget a request; what a peer may still read or write stays held until it is fenced."""
        if request.status is Status.RECEIVING:
            self._receiver.give_up(request, self._clock())
        if request.target is not None and request.target.epoch in self._sender:
            self._sender.cancel(request.target)
        self._leave(request)
        request.status = Status.FINISHED
        del self._requests[request.request_id]

    def _leave(self, request: EngineRequest) -> None:
        self._scheduler.remove(request)
        if self._reads is not None:
            self._reads.forget(request)
        self._grammar_queue.waiting.pop(request.request_id, None)
        if request.num_in_flight_tokens:
            self._leaving.add(request)
        else:
            self._release(request)

    def _release(self, request: EngineRequest) -> None:
        self._tables.release(request)
        self._runner.forget(request.request_id)
        if self._speculation is not None:
            self._speculation.forget(request)

    def _touch(self) -> None:
        self._stalled = False
        self._reporter.changed = True
