"""Runs a batch so that one bad request fails alone.

A row that fails by itself is an outcome like any other.  Guarantees that when
the runner raises, each item is tried once by itself and only those that raise
again are failed; that an engine which fails whole batches in a row is given up
(EngineBrokenError).  What a failed request holds is `engine.core`'s to release.
"""

import logging
from collections import Counter, deque
from dataclasses import dataclass

from pdcluster_worker.engine.batch import Batch, Scheduled
from pdcluster_worker.engine.ports import DraftSamples, ModelRunner, Sample, StepSeconds
from pdcluster_worker.engine.request import Status
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import RAISED, ROW_FAILURES

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Whole batches that may fail in a row: one may be bad luck, three are a broken device or model."""


class EngineBrokenError(RuntimeError):
    """The model fails whatever it is given; the engine process must end."""


Outcome = Sample | DraftSamples | Exception | None
"""Outcome of one item: its tokens, None when it does not reach the end of its known tokens, or the
error.
"""


_OWN_FAULTS = ("no_token_left", "unknown_token_ids", "outside_grammar", "slow_grammar")
"""Reasons that lie in the request: they say nothing of the device or the model."""


@dataclass(slots=True)
class _SubmittedBatch:
    """A batch.

    given:   what the runner has of it; None = nothing yet, because an earlier one failed.
    failure: of its submission.
    """

    batch: Batch
    given: Batch | None = None
    failure: Exception | None = None


class Executor:
    """A runner and the memory of its failures.

    seconds:    what the runner spent on the last batch, retries of its items included.
    num_failed: items that failed since the start, by reason (`ports.RowFailure` and `RAISED`).
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.seconds = StepSeconds()
        self.num_failed: Counter[str] = Counter()
        self._runner = runner
        self._num_failed_steps = 0
        self._queue: deque[_SubmittedBatch] = deque()

    def submit(self, batch: Batch) -> None:
        """Begin to compute a batch; why that failed is `wait`'s to say.

        Raises EngineBrokenError.
        """
        if self._queue:
            self._catch_up(self._queue[0])
        follows_failure = any(
            before.given is None or before.failure is not None for before in self._queue
        )
        submitted = _SubmittedBatch(batch)
        self._queue.append(submitted)
        if not follows_failure:
            self._give(submitted, batch)

    def wait(self) -> list[Outcome]:
        """One outcome per item of the oldest batch, in order; None for a request that has ended
        meanwhile.

        Raises EngineBrokenError after MAX_FAILED_STEPS failed batches in a row.
        """
        self.seconds = StepSeconds()
        submitted = self._queue.popleft()
        batch = self._catch_up(submitted)
        if not batch.items:
            return [None] * len(submitted.batch.items)
        try:
            outcomes = self._waited(submitted)
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
        self._count(batch, outcomes)
        if batch is submitted.batch:
            return outcomes
        known = dict(zip(batch.items, outcomes, strict=True))
        return [known.get(item) for item in submitted.batch.items]

    def _catch_up(self, oldest: _SubmittedBatch) -> Batch:
        """See that the runner has the oldest batch; one that was held back goes without what has
        ended, its tokens known by now.
        """
        if oldest.given is None:
            self._give(oldest, Batch(tuple(item for item in oldest.batch.items if _is_alive(item))))
        assert oldest.given is not None
        return oldest.given

    def _give(self, submitted: _SubmittedBatch, batch: Batch) -> None:
        submitted.given, submitted.failure = batch, None
        if not batch.items:
            return
        try:
            self._runner.submit(batch)
        except EngineBrokenError:
            raise  # a rank of the engine is gone: nothing can be tried again
        except Exception as e:
            submitted.failure = e

    def _waited(self, submitted: _SubmittedBatch) -> list[Outcome]:
        if submitted.failure is not None:
            raise submitted.failure
        outcomes: list[Outcome] = list(self._runner.wait())
        self.seconds += self._runner.seconds
        return outcomes

    def _run(self, batch: Batch) -> list[Outcome]:
        submitted = _SubmittedBatch(batch)
        self._give(submitted, batch)
        return self._waited(submitted)

    def _execute_each(self, batch: Batch) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for item in batch.items:
            if not _is_alive(item):
                outcomes.append(None)
                continue
            try:
                outcomes += self._run(Batch((item,)))
            except Exception as e:
                logger.warning("model failed request=%s: %r", item.request.request_id, e)
                outcomes.append(e)
        return outcomes

    def _count(self, batch: Batch, outcomes: list[Outcome]) -> None:
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        num_alive = sum(1 for item in batch.items if _is_alive(item))
        reasons = [_reason(failure) for failure in failures]
        self.num_failed.update(reasons)
        if len(failures) < num_alive:
            self._num_failed_steps = 0
        elif len(failures) >= 2 and _are_alike(failures) and reasons[0] not in _OWN_FAULTS:
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


def _are_alike(failures: list[Exception]) -> bool:
    return len({(type(failure), _reason(failure)) for failure in failures}) == 1
