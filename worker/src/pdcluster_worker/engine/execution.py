"""Runs a batch so that one bad request fails alone.

Guarantees that when the runner raises, each item is tried once by itself and
only those that raise again are failed; that an engine which fails whole
batches in a row is given up (EngineBrokenError).  What a failed request holds is
`engine.core`'s to release.
"""

import logging

from pdcluster_worker.engine.batch import Batch
from pdcluster_worker.engine.ports import ModelRunner, Sample

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Whole batches that may fail in a row: one may be bad luck, three are a broken device or model."""


class EngineBrokenError(RuntimeError):
    """The model fails whatever it is given; the engine process must end."""


Outcome = Sample | Exception | None
"""Of one item: its token, None when it does not reach the end of its known tokens, or why it failed."""


class Executor:
    """A runner and the memory of its recent failures."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._num_failed_steps = 0

    def execute(self, batch: Batch) -> list[Outcome]:
        """One outcome per item, in order.  Raises EngineBrokenError after MAX_FAILED_STEPS failed batches in a row."""
        try:
            outcomes: list[Outcome] = list(self._runner.execute(batch))
        except Exception as e:
            logger.exception("model step failed items=%d", len(batch.items))
            outcomes = [e] if len(batch.items) == 1 else self._execute_each(batch)
        assert len(outcomes) == len(batch.items), f"{len(outcomes)} outcomes for {len(batch.items)} items"
        self._count(outcomes)
        return outcomes

    def _execute_each(self, batch: Batch) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for item in batch.items:
            try:
                outcomes += self._runner.execute(Batch((item,)))
            except Exception as e:
                logger.warning("model failed request=%s: %r", item.request.request_id, e)
                outcomes.append(e)
        return outcomes

    def _count(self, outcomes: list[Outcome]) -> None:
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if len(failures) < len(outcomes):
            self._num_failed_steps = 0
        elif len(failures) >= 2 and len({type(failure) for failure in failures}) == 1:
            # A lone item tells nothing: it may be the request's fault, so it neither counts nor clears the count.
            self._num_failed_steps += 1
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise EngineBrokenError(
                    f"{self._num_failed_steps} model steps in a row failed for every request: {failures[-1]!r}"
                ) from failures[-1]
