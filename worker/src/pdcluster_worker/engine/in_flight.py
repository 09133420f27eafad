"""Steps under way: submitted to the model, not waited for yet.

With a runner of depth 2 the next step is planned and submitted while one
computes.  What such a step samples is not known then: a request goes on by
position, with a placeholder for each token that is to come.  One that ends
by its length is known ahead and not scheduled again; one that ends at a stop
token is in one step more, and what that step gives for it counts for nothing.
A step with drafts of a request may give it several tokens: no other step takes
the request before that has ended.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdcluster_worker.engine.batch import Batch, Scheduled
from pdcluster_worker.engine.executor import Executor, Outcome
from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.engine.stats import StepTimes, StepWork
from pdcluster_worker.engine.stopping import ends_by_length


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """One step.  started: the clock when it was planned; submitted: when the runner had it."""

    batch: Batch
    work: StepWork
    started: float
    submitted: float


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that has ended.

    outcomes: of the requests that live.  gone: those that ended in the middle of it; no step has
              them any more.
    completed_seconds: the clock when it ended.
    """

    step: InFlightStep
    outcomes: list[tuple[Scheduled, Outcome]]
    gone: list[EngineRequest]
    completed_seconds: float


class InFlightSteps:
    """The steps under way of one engine, in order; at most `depth` of them."""

    def __init__(
        self, executor: Executor, depth: int, max_model_len: int, clock: Callable[[], float]
    ) -> None:
        self._executor = executor
        self._depth = depth
        self._max_model_len = max_model_len
        self._clock = clock
        self._queue: deque[InFlightStep] = deque()
        self._free_seconds = clock()  # when the last step had ended
        self._completed_seconds = self._free_seconds

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        """True if the oldest must be waited for before another is submitted."""
        return len(self._queue) >= self._depth

    def submit(self, batch: Batch, started: float) -> None:
        """Begin a step; its requests go on from where it leaves them.  Raises EngineBrokenError."""
        work, submitted = StepWork.of(batch), self._clock()
        self._executor.submit(batch)
        self._queue.append(InFlightStep(batch, work, started, submitted))
        for item in batch.items:
            request = item.request
            request.num_in_flight_tokens += item.num_tokens
            request.is_waiting = item.waits
            if item.samples:
                request.num_placeholders += 1 + len(item.drafts)
                num_more = request.num_placeholders - len(item.drafts)  # drafts may all be wrong
                request.is_ending = request.target is not None or ends_by_length(
                    request, self._max_model_len, num_more=num_more
                )

    def complete(self) -> CompletedStep:
        """Wait for the oldest.  Raises EngineBrokenError."""
        step = self._queue.popleft()
        outcomes = self._executor.wait()
        completed_seconds = self._clock()
        living: list[tuple[Scheduled, Outcome]] = []
        gone: list[EngineRequest] = []
        for item, outcome in zip(step.batch.items, outcomes, strict=True):
            request = item.request
            request.num_in_flight_tokens -= item.num_tokens
            request.num_placeholders -= item.samples + len(item.drafts)
            request.is_waiting = False
            if request.status is not Status.FINISHED:
                living.append((item, outcome))
            elif not request.num_in_flight_tokens:
                gone.append(request)
        return CompletedStep(step, living, gone, completed_seconds)

    def times(self, completed: CompletedStep) -> StepTimes:
        """Times of a step, once its outcomes are handled: steps that overlap share no second."""
        ended = completed.completed_seconds if self._queue else self._clock()
        step = ended - max(completed.step.started, self._free_seconds)
        model = completed.completed_seconds - max(completed.step.submitted, self._completed_seconds)
        self._free_seconds, self._completed_seconds = ended, completed.completed_seconds
        return StepTimes(step, model, self._executor.seconds)
