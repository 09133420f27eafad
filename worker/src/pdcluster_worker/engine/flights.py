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
from pdcluster_worker.engine.execution import Executor, Outcome
from pdcluster_worker.engine.request import Request, Status
from pdcluster_worker.engine.stats import StepTimes, StepWork
from pdcluster_worker.engine.stopping import ends_by_length


@dataclass(frozen=True, slots=True)
class Flight:
    """One step.  started: the clock when it was planned; submitted: when the runner had it."""

    batch: Batch
    work: StepWork
    started: float
    submitted: float


@dataclass(frozen=True, slots=True)
class Landing:
    """A step that has ended.

    outcomes: of the requests that live.  gone: those that ended in the middle of it; no step has
              them any more.
    landed:   the clock when it ended.
    """

    flight: Flight
    outcomes: list[tuple[Scheduled, Outcome]]
    gone: list[Request]
    landed: float


class Flights:
    """The steps under way of one engine, in order; at most `depth` of them."""

    def __init__(
        self, executor: Executor, depth: int, max_model_len: int, clock: Callable[[], float]
    ) -> None:
        self._executor = executor
        self._depth = depth
        self._max_model_len = max_model_len
        self._clock = clock
        self._queue: deque[Flight] = deque()
        self._free_seconds = clock()  # when the last step had ended
        self._landed_seconds = self._free_seconds

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
        self._queue.append(Flight(batch, work, started, submitted))
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

    def land(self) -> Landing:
        """Wait for the oldest.  Raises EngineBrokenError."""
        flight = self._queue.popleft()
        outcomes = self._executor.wait()
        landed = self._clock()
        living: list[tuple[Scheduled, Outcome]] = []
        gone: list[Request] = []
        for item, outcome in zip(flight.batch.items, outcomes, strict=True):
            request = item.request
            request.num_in_flight_tokens -= item.num_tokens
            request.num_placeholders -= item.samples + len(item.drafts)
            request.is_waiting = False
            if request.status is not Status.FINISHED:
                living.append((item, outcome))
            elif not request.num_in_flight_tokens:
                gone.append(request)
        return Landing(flight, living, gone, landed)

    def times(self, landing: Landing) -> StepTimes:
        """Times of a step, once its outcomes are handled: steps that overlap share no second."""
        ended = landing.landed if self._queue else self._clock()
        step = ended - max(landing.flight.started, self._free_seconds)
        model = landing.landed - max(landing.flight.submitted, self._landed_seconds)
        self._free_seconds, self._landed_seconds = ended, landing.landed
        return StepTimes(step, model, self._executor.seconds)
