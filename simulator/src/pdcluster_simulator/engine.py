"""An engine in simulated time: its own scheduler and block tables, and the seconds of its steps.

A step is scheduled, takes its seconds, and ends with tokens.  While nothing waits and each request
decodes, the scheduler has nothing to decide, and many steps are one (`decode_batch`) until the next
request ends or a message comes.
"""

from collections.abc import Callable, Sequence

from pdcluster_simulator.decode_batch import DecodeBatch, DecodePace
from pdcluster_simulator.engine_owner import EngineOwner
from pdcluster_simulator.events import Machine, SimulatedTime, Work
from pdcluster_simulator.pool import CountedPool
from pdcluster_simulator.requests import EngineWork
from pdcluster_simulator.simulated_step import SimulatedStep, StepTotals, work_of
from pdcluster_simulator.step_model import StepModel
from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.block_table import BlockTables, refusal
from pdcluster_worker.engine.prefill_delayer import OwnBoard, PrefillDelayer, Pressure
from pdcluster_worker.engine.request import Scheduled, Status, ends_by_length
from pdcluster_worker.engine.scheduler.base import Schedule, is_decode
from pdcluster_worker.engine.scheduler.policies import make_scheduler
from pdcluster_worker.messages.engine_settings import DelayerSettings, EngineSettings

Message = Callable[[], None]


class SimulatedEngine:
    """now and messages: of the queue; every message waits for the end of the step in hand."""

    def __init__(
        self,
        queue: SimulatedTime,
        machine: Machine,
        settings: EngineSettings,
        times: StepModel,
        owner: EngineOwner,
        *,
        delayer: DelayerSettings | None = None,
    ) -> None:
        self.settings = settings
        self.totals = StepTotals()
        self.num_receiving = 0
        self.pool = (BlockPool if settings.prefix_caching else CountedPool)(settings.num_blocks)
        self.tables = BlockTables(settings, self.pool)
        self.scheduler = make_scheduler(settings, self.tables)
        self.decodes = DecodeBatch(
            self.tables, settings.block_size, grows=not self.scheduler.reserves_max
        )
        self._queue, self._machine, self._times, self._owner = queue, machine, times, owner
        self._delayer = None if delayer is None else PrefillDelayer(delayer, OwnBoard())
        self._starts_alone = settings.scheduler.name != "request-level"
        # A scheduler of turns decides by the step before.
        self._has_turns = settings.scheduler.name == "simple-chunking"
        self._messages: list[tuple[Message, Message | None]] = []
        self._answers: list[Message] = []
        self._work: Work | None = None
        self._num_steps = 0  # of decodes alone that the work is; 0 = a step of the scheduler
        self._pace = DecodePace(0.0, 0.0)
        self._begun = 0.0
        self._new: dict[EngineWork, None] = {}  # decodes that have had no step in the batch
        self._is_turning = False
        self._is_blocked = False  # what waits cannot be admitted before a request ends

    # --- messages ---------------------------------------------------------------------------------

    def take_times(self, times: StepModel) -> None:
        """Those of another role, on the same accelerators."""
        self._times = times

    def post(self, message: Message, answer: Message | None = None) -> None:
        """Handle it at the end of the step in hand; at once in an engine that rests.

        answer: called when the engine's outputs come after that: those of a step come at its end
        """
        self._messages.append((message, answer))
        if self._is_turning:
            return
        if self._work is None:
            self._turn()
        elif self._num_steps > 1:
            self._cut()

    def submit(self, request: EngineWork) -> None:
        """For `post`: a prompt to compute, for here or for a peer."""
        reason = refusal(request, self.settings, num_more=0)
        if reason is not None:
            self._owner.on_failed(request, reason)
            return
        self._is_blocked = False
        self.scheduler.add(request)

    def receive(self, request: EngineWork) -> int:
        """For `post`: hold blocks for a prompt that a peer computes.

        Returns 0, or how many must be available before it is tried again.  Raises ValueError where
        they never will.
        """
        if (reason := refusal(request, self.settings, num_more=1)) is not None:
            raise ValueError(reason)
        tables, scheduler = self.tables, self.scheduler
        num_tokens = max(request.num_tokens + 1, scheduler.num_admission_tokens(request))
        reservation = tables.reservation(request, num_tokens, received=True)
        needed = reservation.num_needed + scheduler.num_reserved_blocks
        if needed > self.pool.num_available:
            return min(needed, self.pool.num_available + reservation.num_new, self.pool.num_blocks)
        tables.take(request, reservation)
        request.num_cached_tokens = reservation.num_hit_tokens
        request.status = Status.RECEIVING
        self.num_receiving += 1
        return 0

    def received(self, request: EngineWork) -> None:
        """For `post`: its KV and its first token are here."""
        self.num_receiving -= 1
        self.tables.advance(request, request.num_tokens - request.num_computed_tokens)
        request.add_tokens(1)
        request.status = Status.WAITING
        self.scheduler.add_ready(request)

    def release(self, request: EngineWork) -> None:
        """For `post`: the KV of a prompt has left, or one that was received is not needed."""
        if request.status is Status.RECEIVING:
            self.num_receiving -= 1
        self.tables.release(request)
        request.status = Status.FINISHED
        self._freed()

    def abort(self, request: EngineWork) -> None:
        """For `post`: forget a request, wherever it is."""
        if request.status is Status.FINISHED:
            return
        if request in self.decodes.requests:
            self._leave(request)
        self.scheduler.remove(request)
        self.release(request)

    # --- what others see --------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        taken = self.decodes.num_blocks(self._num_done()) if self._num_steps else 0
        return max(0, self.pool.num_available - taken)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.ready) + self.num_receiving

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def waiting_tokens(self) -> int:
        prefills = [each for each in self.scheduler.running if each not in self.decodes.requests]
        started = sum(each.num_tokens - each.num_scheduled_tokens for each in prefills)
        return started + sum(each.num_tokens for each in self.scheduler.waiting)

    @property
    def num_requests(self) -> int:
        return self.scheduler.num_requests + self.num_receiving

    # --- turns ------------------------------------------------------------------------------------

    def _turn(self, _: object = None) -> None:
        """Take the messages, and begin the next step, if there is one to make."""
        if self._work is not None:
            return
        self._is_turning = True
        while self._messages:
            messages, self._messages = self._messages, []
            for message, answer in messages:
                message()
                if answer is not None:
                    self._answers.append(answer)
        self._begin()
        self._is_turning = False
        if self._work is None:
            self._answer()
        elif self._messages and self._num_steps > 1:
            self._cut()

    def _answer(self) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            answer()

    def _begin(self) -> None:
        scheduler = self.scheduler
        has_prefills = len(scheduler.running) > len(self.decodes)
        if (scheduler.waiting and not self._is_blocked) or has_prefills:
            self._schedule()
            return
        if scheduler.ready:
            if not self._starts_alone:
                self._schedule()
                return
            step = Schedule(self.settings.max_batched_tokens)
            scheduler.start_ready(step)
            for request in step.newly_running:
                self._join(request)
        if len(self.decodes) and self._has_turns:
            self._schedule()
        elif len(self.decodes):
            self._decode()

    def _decode(self) -> None:
        decodes = self.decodes
        num_steps = decodes.num_possible(1 if self._answers else decodes.num_steps_left)
        if num_steps == 0:
            self._schedule()  # which preempts
            return
        self._pace = pace = DecodePace(
            self._times.decode_seconds(len(decodes), decodes.context),
            self._times.context_seconds * len(decodes),
        )
        self._num_steps, self._begun = num_steps, self._queue.now
        self._work = self._machine.start(pace.seconds(num_steps), self._decoded)

    def _num_done(self) -> int:
        if self._work is None:
            return 0
        return min(self._num_steps, self._pace.num_steps(self._machine.elapsed(self._work)))

    def _cut(self) -> None:
        """End with the step in hand."""
        num_steps = self._num_done() + 1
        if num_steps < self._num_steps and self._work is not None:
            self._num_steps = num_steps
            self._machine.cut(self._work, self._pace.seconds(num_steps))

    def _decoded(self) -> None:
        number, decodes, now = self._num_steps, self.decodes, self._queue.now
        self._work, self._num_steps, self._is_turning = None, 0, True
        seconds = (now - self._begun) / number  # longer than alone where others compute too
        share = self._pace.first / self._pace.seconds(number)
        first = self._begun + (now - self._begun) * share
        for request in self._new:
            self._owner.on_gaps(first - request.last_token, 1)
        num_rest = number * len(decodes) - len(self._new)
        if num_rest:
            left = number * len(decodes) * seconds - len(self._new) * (first - self._begun)
            self._owner.on_gaps(left / num_rest, num_rest)
        self._new.clear()
        self.totals.num_steps += number
        self.totals.busy_seconds += number * seconds
        self.totals.output_tokens += number * len(decodes)
        decodes.advance(number)
        self.scheduler.completed(len(decodes), seconds)
        self._end_all(decodes.ended())
        self._answer()
        self._turn()

    def _schedule(self) -> None:
        """One step as the engine's scheduler plans it."""
        scheduler, now = self.scheduler, self._queue.now
        self.decodes.sync_all()
        if scheduler.waiting:
            scheduler.preempt_for_priority()
        admits = self._allows(now)
        step = scheduler.schedule(admit=admits)
        for request in [each for each in self.decodes.requests if each not in step.items]:
            self._leave(request)
        for started in step.newly_running:
            if started.scheduled_seconds is None:
                started.scheduled_seconds = now
        for failed, reason in step.failed:
            self._freed()
            self._owner.on_failed(_work(failed), reason)
        if self._delayer is not None:
            self._delayer.finish(len(step.admitted), scheduler.num_requests == 0, now)
        if not step.items:
            self._rest(step)
            return
        items = list(step.items.values())
        work = work_of(items)
        seconds = self._times.seconds(work)
        is_quiet = admits and not (step.admitted or step.preempted or step.failed)
        is_decodes = len(items) == len(self.decodes)
        self._is_blocked = is_quiet and is_decodes
        self._begun = now
        self._work = self._machine.start(seconds, lambda: self._stepped(items, work))

    def _allows(self, now: float) -> bool:
        if self._delayer is None:
            return True
        scheduler = self.scheduler
        allows = self._delayer.begin(Pressure.of(scheduler), now)
        has_begun = bool(scheduler.waiting) and scheduler.waiting[0].status is Status.PREEMPTED
        return allows or has_begun

    def _rest(self, step: Schedule) -> None:
        """Nothing was scheduled: again at once after progress, else when a delay is over."""
        if step.progressed:
            self._queue.at(self._queue.now, self._turn)
        elif self._delayer is not None:
            pause = self._delayer.next_pass_seconds(self._queue.now)
            if pause is not None:
                self._queue.at(self._queue.now + pause, self._turn)

    def _stepped(self, items: Sequence[Scheduled], work: SimulatedStep) -> None:
        self._work, self._is_turning = None, True
        seconds = self._queue.now - self._begun
        self.totals.count(items, work, seconds)
        num_old = 0
        ended: list[EngineWork] = []
        for item in items:
            request = _work(item.request)
            self.tables.advance(request, item.num_tokens)
            if request in self.decodes.requests and request not in self._new:
                request.add_tokens(1)
                num_old += 1
            elif item.samples:
                self._sampled(request, item, ended)
            elif request.target is not None:
                self._owner.on_computed(request, item.num_tokens)
        if num_old:
            self._owner.on_gaps(seconds, num_old)
        self._new.clear()
        self.decodes.stepped()
        for item in items:
            is_new = item.samples and item.request not in self.decodes.requests
            is_running = item.request.status is Status.RUNNING and item.request not in ended
            if is_new and is_running and is_decode(item.request):
                self._join(item.request)
        self.scheduler.completed(work.rows, seconds)
        self._end_all([*self.decodes.ended(), *ended])
        self._answer()
        self._turn()

    def _sampled(self, request: EngineWork, item: Scheduled, ended: list[EngineWork]) -> None:
        """A token of a request that was no decode of the batch before."""
        request.add_tokens(1)
        is_first = request.last_token < 0.0
        if not is_first:
            self._owner.on_gaps(self._queue.now - request.last_token, 1)
        request.last_token = self._queue.now
        if request in self.decodes.requests:
            return
        if request.target is not None:
            self._owner.on_computed(request, item.num_tokens)
        if ends_by_length(request, self.settings.max_model_len, num_more=0):
            ended.append(request)
            if is_first:
                self._owner.on_token(request)
        elif request.target is not None:
            self.scheduler.remove(request)
            request.status = Status.SENDING
            self._owner.on_token(request)
        elif is_first:
            self._owner.on_token(request)

    def _join(self, request: object) -> None:
        work = _work(request)
        longest = self.settings.max_model_len - work.num_tokens
        left = work.sampling.max_tokens - work.num_output_tokens
        self.decodes.join(work, max(1, min(left, longest)))
        self._new[work] = None

    def _leave(self, request: EngineWork) -> None:
        if request in self._new:
            del self._new[request]
        else:
            request.last_token = self._queue.now
        self.decodes.leave(request)

    def _end_all(self, requests: Sequence[EngineWork]) -> None:
        for request in requests:
            self.scheduler.remove(request)
            self.tables.release(request)
            request.status = Status.FINISHED
        if requests:
            self._freed()
        for request in requests:
            request.last_token = self._queue.now
            self._owner.on_end(request)

    def _freed(self) -> None:
        self._is_blocked = False
        self._owner.on_freed()


def _work(request: object) -> EngineWork:
    assert isinstance(request, EngineWork)
    return request
