"""Watches requests, trains the estimator, and refuses unmeetable deadlines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil

from pdcluster_schema.qos import EstimationSpec
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.requests import UNDATED_SECONDS, RequestSpec, Token
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.waiting_time.load_aware import make_estimator
from pdcluster_worker.routing.waiting_time.request_groups import Labels, slo_class
from pdcluster_worker.routing.waiting_time.request_queue import (
    Completion,
    Estimator,
    QueuedRequest,
    QueueState,
    RequestQueue,
)
from pdcluster_worker.tracing.request_trace import add_event

MAX_LABELS = 16
"""Groups with a label of their own in the metrics; clients choose deadlines, and so how many groups
there are.
"""

MAX_RETRY_SECONDS = 600

WAITED_STEPS = 0.05
"""Steps of deadlines that a request may have waited, as all do for some time, and still be of the
group of its deadline.
"""


class UnmeetableDeadlineError(RequestError):
    """This worker would complete the request too late; another may not."""

    def __init__(self, estimated: float, deadline: float) -> None:
        text = f"{deadline:.3g}" if deadline < 1000 else f"{deadline:.0f}"
        super().__init__(
            f"pdcluster.deadline_ms: the answer would be complete in about {estimated:.1f} s, "
            f"after the deadline of {text} s: "
            "allow more time or fewer tokens, or retry later",
            status=503,
            param="pdcluster.deadline_ms",
            code="deadline_unmeetable",
            retry_after_seconds=max(1, min(MAX_RETRY_SECONDS, ceil(estimated - deadline))),
        )


class TrackedRequest:
    """One request from its arrival; `token` takes each of its tokens."""

    def __init__(self, request: QueuedRequest, estimation: "Estimation") -> None:
        self.request = request
        self._estimation = estimation
        self._arrival = estimation.clock()
        self._first: tuple[float, float, Token] | None = None  # seconds, area, token
        self.estimates: dict[str, float] = {}
        self.is_complete = False

    def token(self, token: Token) -> None:
        """Count a token; the first and the last are compared with what was estimated."""
        self.request.num_tokens += 1
        if self._first is None:
            self._estimation.started(self.request)
            self._first = (self._estimation.clock(), self._estimation.area, token)
            self._compare("ttft")
        if token.finish_reason is not None:
            self.is_complete = True
            self._compare("completion")

    def completion(self) -> Completion | None:
        """The measurements; None of a request that did not end by itself."""
        if self._first is None or not self.is_complete:
            return None
        start, area, token = self._first
        seconds = self._estimation.clock() - start
        prefilled = max(0, self.request.prompt_tokens - token.cached_tokens)
        batch = (self._estimation.area - area) / seconds if seconds > 0 else 1.0
        return Completion(
            self.request.group,
            prefilled,
            self.request.num_tokens,
            token.prefill_seconds,
            seconds if self.request.is_timed else None,
            max(1.0, batch),
        )

    def _compare(self, quantity: str) -> None:
        if quantity in self.estimates:
            actual = self._estimation.clock() - self._arrival
            self._estimation.compare(quantity, self.request.group, self.estimates[quantity], actual)


class Estimation:
    """One per worker."""

    def __init__(
        self,
        metrics: Metrics,
        policy: Callable[[], EstimationSpec],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots: Callable[[], int] = lambda: 1
        # Called when a request has come or ended.
        self.on_change: Callable[[], None] = lambda: None
        self.clock = clock
        self._metrics = metrics
        self._policy = policy
        self._made_for: tuple[str, float | None, int] | None = None
        self._estimator: Estimator | None = None
        self._requests = RequestQueue()
        self._labels = Labels(MAX_LABELS)
        self._num_decoding = 0
        self._area, self._since = 0.0, clock()

    @property
    def estimator(self) -> Estimator | None:
        """The one of the policy in force; a new one begins without measurements."""
        policy = self._policy()
        made_for = policy.estimator, policy.preset_token_milliseconds, policy.preset_output_tokens
        if made_for != self._made_for:
            self._made_for, self._estimator = made_for, make_estimator(policy)
        return self._estimator

    @property
    def area(self) -> float:
        """Integral of the requests that decode over time."""
        now = self.clock()
        self._area += self._num_decoding * (now - self._since)
        self._since = now
        return self._area

    def started(self, request: QueuedRequest) -> None:
        self._requests.began(request)
        self._area, self._num_decoding = self.area, self._num_decoding + 1

    def request_of(self, spec: RequestSpec) -> QueuedRequest:
        """A request as the estimators see it, when it comes."""
        step, deadline = self._policy().slo_granularity_seconds, spec.deadline_seconds
        name = slo_class(None if deadline is None else deadline + WAITED_STEPS * step, step)
        due = self.clock() + (UNDATED_SECONDS if deadline is None else deadline)
        return QueuedRequest(
            group=name,
            prompt_tokens=spec.num_tokens,
            max_tokens=max(1, spec.sampling.max_tokens - len(spec.output)),
            priority=spec.priority,
            due_seconds=due,
            due_group=f"{spec.priority}/{name}@{due // step:.0f}",
            slo_seconds=deadline,
            arrival_seconds=self.clock(),
        )

    @property
    def queue(self) -> QueueState:
        return QueueState(self._requests, self.slots())

    @contextmanager
    def tracking(self, spec: RequestSpec) -> Iterator[TrackedRequest]:
        """A request that runs here.  Raises RequestError 503 for an unmeetable deadline."""
        tracked = TrackedRequest(self.request_of(spec), self)
        self._estimate(tracked, spec)
        self._requests.add(tracked.request)
        self.on_change()
        try:
            yield tracked
        finally:
            self._requests.remove(tracked.request)
            completion = tracked.completion()
            if tracked.request.is_decoding:
                self._area, self._num_decoding = self.area, self._num_decoding - 1
            if completion is not None and (estimator := self.estimator) is not None:
                estimator.observe(completion)
            self.on_change()

    def compare(self, quantity: str, group: str, estimated: float, actual: float) -> None:
        """Count how far an estimate was off, as a share of what came of it."""
        if actual > 0:
            error = abs(estimated - actual) / actual
            self._metrics.estimate_error_ratio.labels(quantity, self._labels.label(group)).observe(
                error
            )

    def _estimate(self, tracked: TrackedRequest, spec: RequestSpec) -> None:
        estimator = self.estimator
        if estimator is None:
            return
        request, queue = tracked.request, self.queue
        first, last = (
            estimator.estimated_ttft_seconds(request, queue),
            estimator.estimated_completion_seconds(request, queue),
        )
        if first is None or last is None:
            return
        tracked.estimates = {"ttft": first, "completion": last}
        add_event("estimate", group=request.group, ttft_seconds=first, completion_seconds=last)
        deadline = spec.deadline_seconds
        # One that has begun is not given up: its client has seen a part of the answer.
        if (
            deadline is not None
            and last > deadline
            and not spec.output
            and self._policy().reject_unmeetable
        ):
            raise UnmeetableDeadlineError(last, deadline)
