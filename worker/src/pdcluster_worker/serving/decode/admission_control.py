"""Admits, degrades, sheds and demotes requests of one decode worker (`routing.qos`)."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from pdcluster_schema.qos import Tier
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdcluster_worker.routing.offload import length_threshold
from pdcluster_worker.routing.qos import load_shedding
from pdcluster_worker.routing.qos.averages import Averages, Meter
from pdcluster_worker.routing.qos.load_shedding import (
    PRIORITIES,
    TOO_MANY_REQUESTS,
    LoadEstimate,
    LoadRefusal,
    aged,
    full,
    seconds_until_capacity,
    slo_of,
    tier_of,
)
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing.request_trace import add_event

_DEMOTED = "-low"
"""Added to the id of a request that starts again with low priority: its first run may still be
ending.
"""


_NORMAL = RequestSpec("", [], SamplingParams(max_tokens=1, seed=0))


@dataclass(slots=True, eq=False)
class _PendingFirstToken:
    """A request without a first token.  given_up: why it is not waited for any longer."""

    tier: Tier
    num_tokens: int
    timeout: asyncio.Timeout
    given_up: LoadRefusal | None = None
    alarm: asyncio.TimerHandle | None = None
    is_over: bool = False

    def cancel(self) -> None:
        """Forget the request: nothing looks at it again."""
        if self.alarm is not None:
            self.alarm.cancel()

    def end(self) -> None:
        """Wake the request up, once."""
        if self.is_over:
            return
        self.is_over = True
        self.timeout.reschedule(asyncio.get_running_loop().time())


class AdmittedRequest(Struct, frozen=True):
    """Terms on which a request runs, and what it has lost (`degraded`)."""

    spec: RequestSpec
    prefill: PrefillMode
    since: float
    lost: tuple[str, ...] = ()

    @property
    def tier(self) -> Tier:
        return tier_of(self.spec.priority)


@dataclass(slots=True)
class QueueSlot:
    """One run of a request on its terms.  has_started: it has its first token."""

    terms: AdmittedRequest
    has_started: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.terms.spec.prompt) + len(self.terms.spec.output)


class AdmissionControl:
    """One per decode worker."""

    def __init__(self, worker: WorkerContext, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._clock = clock
        self._meter = Meter(clock)
        self._averages = Averages()
        self._waits: dict[_PendingFirstToken, None] = {}  # by arrival
        worker.metrics.qos_estimated_ttft_seconds.set_function(
            lambda: self._estimated(lambda estimate: estimate.ttft_seconds)
        )
        worker.metrics.qos_estimated_tpot_seconds.set_function(
            lambda: self._estimated(lambda estimate: estimate.tpot_seconds)
        )

    @property
    def num_waiting(self) -> int:
        return self._meter.num_waiting

    @property
    def waiting_tokens(self) -> int:
        return sum(wait.num_tokens for wait in self._waits)

    def admit(self, specs: Sequence[RequestSpec]) -> None:
        """Take all choices of a prompt.  Raises RequestError 429 (low priority) or 503 (full)."""
        spec, num_tokens = specs[0], sum(len(spec.prompt) + len(spec.output) for spec in specs)
        tier = tier_of(spec.priority)
        if tier == "low" and not spec.output:
            self._check_objectives(spec)
        self._check_capacity(num_tokens, tier)
        self._worker.metrics.qos_admitted.labels(tier).inc()

    def _check_objectives(self, spec: RequestSpec) -> None:
        """Raise RequestError 429 for a request of low priority that is not taken now."""
        policy, tier = self._worker.policy, tier_of(spec.priority)
        estimate = self._estimate(spec)
        add_event("admission", tier=tier, **_known(estimate))
        refusal = load_shedding.refusal(
            policy, tier, len(spec.prompt), slo_of(spec, policy.slo), estimate
        )
        if refusal is not None:
            raise self._refused(refusal, tier)

    @contextmanager
    def turn(self, terms: AdmittedRequest) -> Iterator[QueueSlot]:
        """Count a request that runs on its terms, until it ends or is demoted."""
        turn = QueueSlot(terms)
        self._meter.joined()
        try:
            yield turn
        finally:
            self._meter.left(has_started=turn.has_started)

    async def first(
        self, turn: QueueSlot, tokens: AsyncGenerator[Generated, None]
    ) -> Generated | None:
        """Wait for the first token; None = run again, as `demoted`.  Raises RequestError."""
        terms = turn.terms
        # One that has begun elsewhere is not shed.
        first = await anext(tokens) if terms.spec.output else await self._awaited(tokens, turn)
        if first is None:
            return None
        turn.has_started = True
        self._meter.started(turn.num_tokens)
        return replace(first, degraded=terms.lost) if terms.lost else first

    def token(self) -> None:
        self._meter.token()

    async def _awaited(
        self, tokens: AsyncGenerator[Generated, None], turn: QueueSlot
    ) -> Generated | None:
        tier = turn.terms.tier
        wait: _PendingFirstToken | None = None
        try:
            async with asyncio.timeout(None) as timeout:
                wait = _PendingFirstToken(tier, turn.num_tokens, timeout)
                self._waits[wait] = None
                self._watch(wait)
                return await anext(tokens)
        except TimeoutError:
            if wait is None or not wait.timeout.expired():
                raise
            if wait.given_up is None:
                return None
            raise self._refused(wait.given_up, tier) from None
        finally:
            if wait is not None:
                del self._waits[wait]
                wait.cancel()

    def _watch(self, wait: _PendingFirstToken) -> None:
        low = self._worker.policy.low_priority
        late: Tier = "low" if low.past_threshold == "Shed" else "normal"
        if low.threshold_milliseconds is not None and wait.tier == late:
            wait.alarm = asyncio.get_running_loop().call_later(
                low.threshold_milliseconds / 1000.0, self._too_long, wait
            )

    def _too_long(self, wait: _PendingFirstToken) -> None:
        """A request has waited too long: unless it waits alone, it makes room for the others."""
        if len(self._waits) == 1:
            self._watch(wait)
            return
        if wait.tier == "low" and not wait.is_over:
            milliseconds = self._worker.policy.low_priority.threshold_milliseconds or 0.0
            message = (
                f"low priority: no first token in {milliseconds:g} ms "
                "(qos.lowPriority.thresholdMilliseconds): retry later"
            )
            wait.given_up = LoadRefusal(
                "waited_too_long",
                message,
                load_shedding.retry_after(self._seconds_of(self.waiting_tokens)),
            )
        wait.end()

    def _check_capacity(self, num_tokens: int, tier: Tier) -> None:
        """Raise RequestError when full; high priority displaces the last low one."""
        admission, waiting_tokens = self._worker.policy.admission, self.waiting_tokens
        reason = full(admission, self.num_waiting, waiting_tokens, num_tokens)
        if reason is None:
            return
        low = [wait for wait in self._waits if wait.tier == "low" and not wait.is_over]
        if tier == "high" and low and self._worker.policy.early_rejection.enabled:
            message = (
                "low priority: the queue is full, and a request of high priority takes this place: "
                "retry later"
            )
            low[-1].given_up = LoadRefusal(
                "displaced", message, load_shedding.retry_after(self._seconds_of(waiting_tokens))
            )
            low[-1].end()
            return
        wait = seconds_until_capacity(
            admission,
            self.num_waiting,
            waiting_tokens + num_tokens,
            self._averages.firsts_per_second,
            self._averages.prompt_token_seconds,
        )
        self._worker.metrics.qos_rejected.labels("queue_full", tier).inc()
        raise RequestError(
            reason,
            status=503,
            code="queue_full",
            retry_after_seconds=load_shedding.retry_after(wait),
        )

    def terms(self, spec: RequestSpec, prefill: PrefillMode) -> AdmittedRequest:
        """Raises RequestError for a forced remote prefill that its priority bars."""
        policy, tier = self._worker.policy, tier_of(spec.priority)
        if tier != "low" or spec.output:
            return AdmittedRequest(spec, prefill, since=self._clock())
        loss = load_shedding.degradation(
            policy, tier, load_shedding.pressure(self._estimate(spec), slo_of(spec, policy.slo))
        )
        lost: list[str] = []
        if loss.max_tokens is not None and loss.max_tokens < spec.sampling.max_tokens:
            lost.append(f"max_tokens={loss.max_tokens}")
            spec = replace(spec, sampling=spec.sampling.capped(loss.max_tokens))
        if loss.is_local and prefill == "remote":
            message = (
                "low priority: prefill workers are barred now (qos.lowPriority.prefillWorkers): "
                'leave pdcluster.prefill "remote" out'
            )
            raise self._refused(LoadRefusal("prefill_barred", message, 1), tier)
        if loss.is_local and prefill == "auto" and self._worker.role == "decode":
            prefill = "local"
            if len(spec.prompt) >= length_threshold(policy.offload, self._worker.gpu):
                lost.append("prefill=local")
        self._count_lost(lost, tier)
        return AdmittedRequest(spec, prefill, since=self._clock(), lost=tuple(lost))

    def demoted(self, terms: AdmittedRequest) -> AdmittedRequest:
        """Give the same request low priority, and what that loses."""
        spec = aged(terms.spec, self._clock() - terms.since)
        spec = replace(spec, request_id=spec.request_id + _DEMOTED, priority=PRIORITIES["low"])
        self._count_lost(["priority=low"], terms.tier)
        low = self.terms(spec, terms.prefill)
        return replace(low, lost=(*terms.lost, "priority=low", *low.lost))

    def _count_lost(self, lost: Sequence[str], tier: Tier) -> None:
        for what in lost:
            add_event("degraded", what=what)
            self._worker.metrics.qos_degraded.labels(what.partition("=")[0], tier).inc()

    def _refused(self, refusal: LoadRefusal, tier: Tier) -> RequestError:
        add_event("refused", reason=refusal.code, retry_after_seconds=refusal.retry_after_seconds)
        self._worker.metrics.qos_rejected.labels(refusal.code, tier).inc()
        return RequestError(
            refusal.message,
            status=TOO_MANY_REQUESTS,
            code=refusal.code,
            retry_after_seconds=refusal.retry_after_seconds,
        )

    def _estimate(self, spec: RequestSpec) -> LoadEstimate:
        measured = self._meter.take()
        if measured is not None:
            self._averages.refresh(measured)
        estimation = self._worker.estimation
        estimator = estimation.estimator or self._averages
        ends = self._averages.ends_per_second
        return LoadEstimate(
            ttft_seconds=estimator.estimated_ttft_seconds(
                estimation.request_of(spec), estimation.queue
            ),
            tpot_seconds=self._averages.estimated_tpot_seconds(
                self._meter.num_streams + self._meter.num_waiting + 1
            ),
            turn_seconds=1 / ends if ends else None,
        )

    def _seconds_of(self, prompt_tokens: int) -> float | None:
        seconds = self._averages.prompt_token_seconds
        return None if seconds is None else prompt_tokens * seconds

    def _estimated(self, figure: Callable[[LoadEstimate], float | None]) -> float:
        """Estimate for a request of normal priority that came now; NaN while nothing is known."""
        value = figure(self._estimate(_NORMAL))
        return math.nan if value is None else value


def _known(estimate: LoadEstimate) -> dict[str, float]:
    figures = {"ttft_seconds": estimate.ttft_seconds, "tpot_seconds": estimate.tpot_seconds}
    return {name: value for name, value in figures.items() if value is not None}
