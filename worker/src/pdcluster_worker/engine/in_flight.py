"""Steps in flight: the one queue of batches that the model has and that are not waited for yet."""

# With a runner of depth 2 the next step is planned and prepared while one computes.  What a step
# samples is not known then: a request goes on by position, with a placeholder for each token.
# A request that ends at a stop token is already in the next step; that token is discarded.
#
# When the runner raises, each item is tried once by itself, and only those that raise again fail.

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdcluster_worker.engine.ports import (
    DraftSamples,
    EngineBrokenError,
    ModelRunner,
    RowOutcome,
    Sample,
    StepSeconds,
    execute,
)
from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled, Status, ends_by_length
from pdcluster_worker.engine.stats import StepTimes, StepWork
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import RAISED, ROW_FAILURES

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Whole batches that may fail in a row: one may be bad luck, three are a broken device or model."""

Outcome = RowOutcome | Exception
"""Outcome of one item: its tokens, None if not all known tokens are computed, or the error."""

_OWN_FAULTS = ("no_token_left", "unknown_token_ids", "outside_grammar", "slow_grammar")
"""Reasons that lie in the request: they say nothing of the device or the model."""


@dataclass(slots=True)
class InFlightStep:
    batch: Batch
    work: StepWork
    started: float  # the clock when it was planned
    submitted: float  # when the runner had it
    # What the runner has of `batch`; None = nothing yet, because an earlier step failed.
    given: Batch | None = None
    prepared: Any = None  # the runner's
    error: Exception | None = None  # why it could not be prepared or begun


@dataclass(frozen=True, slots=True)
class CompletedStep:
    step: InFlightStep
    outcomes: list[tuple[Scheduled, Outcome]]  # of the requests that live
    gone: list[EngineRequest]  # requests that ended in the middle of it; no step has them any more
    completed_seconds: float  # the clock when it ended


class InFlightSteps:
    """The steps in flight of one engine, in order; at most the runner's `depth` of them."""

    def __init__(self, runner: ModelRunner, max_model_len: int, clock: Callable[[], float]) -> None:
        # Items that failed since the start, by reason (`ROW_FAILURES` and `RAISED`).
        self.num_failed: Counter[str] = Counter()
        self._runner = runner
        self._max_model_len = max_model_len
        self._clock = clock
        self._queue: deque[InFlightStep] = deque()
        self._num_failed_steps = 0
        self._phases = StepSeconds()  # of the last step, retries of its items included
        self._free_seconds = clock()  # when the last step had ended
        self._completed_seconds = self._free_seconds

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        return len(self._queue) >= self._runner.depth

    def submit(self, batch: Batch, started: float) -> None:
        """Begin a step; what fails now is an outcome of `complete`.  Raises EngineBrokenError."""
        work, submitted = StepWork.of(batch), self._clock()
        if self._queue:
            self._catch_up(self._queue[0])
        holds_back = any(each.given is None or each.error is not None for each in self._queue)
        step = InFlightStep(batch, work, started, submitted)
        self._queue.append(step)
        if not holds_back:
            self._prepare(step, batch)
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
        """Wait for the oldest step, and begin the next.  Raises EngineBrokenError."""
        batch = self._catch_up(self._queue[0])
        step = self._queue.popleft()
        known = dict(zip(batch.items, self._outcomes(step, batch), strict=True))
        completed_seconds = self._clock()
        living: list[tuple[Scheduled, Outcome]] = []
        gone: list[EngineRequest] = []
        for item in step.batch.items:
            request = item.request
            request.num_in_flight_tokens -= item.num_tokens
            request.num_placeholders -= item.samples + len(item.drafts)
            request.is_waiting = False
            if request.status is not Status.FINISHED:
                living.append((item, known.get(item)))
            elif not request.num_in_flight_tokens:
                gone.append(request)
        return CompletedStep(step, living, gone, completed_seconds)

    def times(self, completed: CompletedStep) -> StepTimes:
        """Times of a step, once its outcomes are handled: steps that overlap share no second."""
        ended = completed.completed_seconds if self._queue else self._clock()
        step = ended - max(completed.step.started, self._free_seconds)
        model = completed.completed_seconds - max(completed.step.submitted, self._completed_seconds)
        self._free_seconds, self._completed_seconds = ended, completed.completed_seconds
        return StepTimes(step, model, self._phases)

    def _catch_up(self, oldest: InFlightStep) -> Batch:
        if oldest.given is None:
            alive = tuple(item for item in oldest.batch.items if _is_alive(item))
            self._prepare(oldest, Batch(alive))
        assert oldest.given is not None
        return oldest.given

    def _prepare(self, step: InFlightStep, batch: Batch) -> None:
        step.given, step.error = batch, None
        if not batch.items:
            return
        try:
            step.prepared = self._runner.prepare(batch)
            if step is self._queue[0]:
                self._runner.begin(step.prepared, {})
        except EngineBrokenError:
            raise  # a rank of the engine is gone: nothing can be tried again
        except Exception as e:
            step.error = e

    def _begin_next(self, batch: Batch, outcomes: list[Outcome]) -> None:
        following = self._queue[0] if self._queue else None
        if following is None or following.error is not None or not following.given:
            return
        sampled = {
            item.request: outcome.token_id
            for item, outcome in zip(batch.items, outcomes, strict=True)
            if isinstance(outcome, Sample)
        }
        try:
            if following.given.items:
                self._runner.begin(following.prepared, sampled)
        except EngineBrokenError:
            raise
        except Exception as e:
            following.error = e

    def _outcomes(self, step: InFlightStep, batch: Batch) -> list[Outcome]:
        """One for each item of `batch`; None for a request that has ended meanwhile."""
        self._phases = StepSeconds()
        outcomes: list[Outcome] = []
        try:
            if step.error is not None:
                raise step.error
            if batch.items:
                outcomes = list(self._runner.wait(step.prepared))
                self._phases = self._runner.seconds
            self._begin_next(batch, outcomes)
        except EngineBrokenError:
            raise
        except Exception as e:
            logger.exception("model step failed items=%d", len(batch.items))
            for later in self._queue:
                later.given = None  # the tokens of this one are not in it
            outcomes = [e] if len(batch.items) == 1 else self._execute_each(batch)
        assert len(outcomes) == len(batch.items), (
            f"{len(outcomes)} outcomes for {len(batch.items)} items"
        )
        outcomes = [
            outcome if _is_alive(item) else None
            for item, outcome in zip(batch.items, outcomes, strict=True)
        ]
        self._count_failures(batch, outcomes)
        return outcomes

    def _execute_each(self, batch: Batch) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for item in batch.items:
            if not _is_alive(item):
                outcomes.append(None)
                continue
            try:
                outcomes += execute(self._runner, Batch((item,)))
                self._phases += self._runner.seconds
            except EngineBrokenError:
                raise
            except Exception as e:
                logger.warning("model failed request=%s: %r", item.request.request_id, e)
                outcomes.append(e)
        return outcomes

    def _count_failures(self, batch: Batch, outcomes: list[Outcome]) -> None:
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        num_alive = sum(1 for item in batch.items if _is_alive(item))
        reasons = [_reason(failure) for failure in failures]
        self.num_failed.update(reasons)
        is_alike = len({(type(failure), _reason(failure)) for failure in failures}) == 1
        if len(failures) < num_alive:
            self._num_failed_steps = 0
        elif len(failures) >= 2 and is_alike and reasons[0] not in _OWN_FAULTS:
            # A lone item proves nothing: it may be the request's fault, so it neither counts nor
            # clears the count; nor does a batch of requests that are all at fault.
            self._num_failed_steps += 1
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise EngineBrokenError(
                    f"{self._num_failed_steps} model steps in a row failed for every request: "
                    f"{failures[-1]!r}"
                ) from failures[-1]


def _is_alive(item: Scheduled) -> bool:
    return item.request.status is not Status.FINISHED


def _reason(error: Exception) -> str:
    code = error.code if isinstance(error, RequestError) else None
    return code if code in ROW_FAILURES else RAISED


def verified(
    drafts: Sequence[int], rows: Sequence[Sample | RequestError]
) -> Sample | DraftSamples | RequestError:
    """The outcome of the rows of known tokens and of each draft, up to the first wrong draft."""
    samples: list[Sample] = []
    for draft, row in zip((*drafts, None), rows, strict=True):
        if isinstance(row, RequestError):
            break
        samples.append(row)
        if row.token_id != draft:
            break
    if not drafts or not samples:
        return rows[0]
    return DraftSamples(tuple(samples))
