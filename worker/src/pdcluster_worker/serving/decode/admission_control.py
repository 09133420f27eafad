"""Admits, degrades, sheds and demotes requests of one decode worker (`routing.qos`)."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
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
    retry_after,
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


class AdmittedRequest(Struct, frozen=True):
    """A request as it runs, and what it has lost (`degraded`)."""

    spec: RequestSpec
    prefill: PrefillMode
    since: float
    lost: tuple[str, ...] = ()

    @property
    def tier(self) -> Tier:
        return tier_of(self.spec.priority)


@dataclass(slots=True)
class QueueSlot:
    """One run of an admitted request.  has_started: it has its first token."""

    admitted: AdmittedRequest
    has_started: bool = False


@dataclass(slots=True, eq=False)
class _PendingFirstToken:
    """A request without a first token.  refusal: why it is not waited for any longer."""

    tier: Tier
    num_tokens: int
    timeout: asyncio.Timeout
    refusal: LoadRefusal | None = None
    alarm: asyncio.TimerHandle | None = None
    is_over: bool = False

    def end(self, refusal: LoadRefusal | None = None) -> None:
        """Wake the request up: it is refused, or demoted where there is no refusal."""
        self.is_over, self.refusal = True, refusal
        self.timeout.reschedule(asyncio.get_running_loop().time())


class AdmissionControl:
    """One per decode worker."""

    def __init__(self, worker: WorkerContext) -> None:
        self._worker = worker
        self._meter = Meter(time.monotonic)
        self._averages = Averages()
        self._pending: dict[_PendingFirstToken, None] = {}  # by arrival
        # estimates for a request of normal priority that came now; NaN while nothing is known
        metrics = worker.metrics
        metrics.qos_estimated_ttft_seconds.set_function(
            lambda: _or_nan(self._estimate(_NORMAL).ttft_seconds)
        )
        metrics.qos_estimated_tpot_seconds.set_function(
            lambda: _or_nan(self._estimate(_NORMAL).tpot_seconds)
        )

    @property
    def num_waiting(self) -> int:
        return self._meter.num_waiting

    @property
    def waiting_tokens(self) -> int:
        return sum(pending.num_tokens for pending in self._pending)

    def admit(self, specs: Sequence[RequestSpec]) -> None:
        """Take all choices of a prompt.  Raises RequestError 429 (low priority) or 503 (full)."""
        spec, policy = specs[0], self._worker.policy
        tier = tier_of(spec.priority)
        if tier == "low" and not spec.output:
            estimate = self._estimate(spec)
            figures = {
                "ttft_seconds": estimate.ttft_seconds,
                "tpot_seconds": estimate.tpot_seconds,
            }
            known = {name: value for name, value in figures.items() if value is not None}
            add_event("admission", tier=tier, **known)
            refusal = load_shedding.refusal(
                policy, tier, len(spec.prompt), slo_of(spec, policy.slo), estimate
            )
            if refusal is not None:
                raise self._refused(refusal, tier)
        self._check_capacity(sum(spec.num_tokens for spec in specs), tier)
        self._worker.metrics.qos_admitted.labels(tier).inc()

    def _check_capacity(self, num_tokens: int, tier: Tier) -> None:
        """Raise RequestError when full; high priority displaces the last low one."""
        policy, waiting_tokens = self._worker.policy, self.waiting_tokens
        reason = full(policy.admission, self.num_waiting, waiting_tokens, num_tokens)
        if reason is None:
            return
        low = [pending for pending in self._pending if pending.tier == "low"]
        low = [pending for pending in low if not pending.is_over]
        if tier == "high" and low and policy.early_rejection.enabled:
            message = (
                "low priority: the queue is full, and a request of high priority takes this place: "
                "retry later"
            )
            low[-1].end(LoadRefusal("displaced", message, self._retry_after()))
            return
        wait = seconds_until_capacity(
            policy.admission,
            self.num_waiting,
            waiting_tokens + num_tokens,
            self._averages.firsts_per_second,
            self._averages.prompt_token_seconds,
        )
        self._worker.metrics.qos_rejected.labels("queue_full", tier).inc()
        raise RequestError(
            reason, status=503, code="queue_full", retry_after_seconds=retry_after(wait)
        )

    @contextmanager
    def queued(self, admitted: AdmittedRequest) -> Iterator[QueueSlot]:
        """Count a request that runs, until it ends or is demoted."""
        slot = QueueSlot(admitted)
        self._meter.joined()
        try:
            yield slot
        finally:
            self._meter.left(has_started=slot.has_started)

    async def first(
        self, slot: QueueSlot, tokens: AsyncGenerator[Generated, None]
    ) -> Generated | None:
        """Wait for the first token; None = run again, as `demoted`.  Raises RequestError."""
        admitted = slot.admitted
        if admitted.spec.output:  # one that has begun elsewhere is not shed
            first = await anext(tokens)
        elif (pending_first := await self._pending_first(admitted, tokens)) is None:
            return None
        else:
            first = pending_first
        slot.has_started = True
        self._meter.started(admitted.spec.num_tokens)
        return replace(first, degraded=admitted.lost) if admitted.lost else first

    def token(self) -> None:
        self._meter.token()

    async def _pending_first(
        self, admitted: AdmittedRequest, tokens: AsyncGenerator[Generated, None]
    ) -> Generated | None:
        timeout = asyncio.timeout(None)
        pending = _PendingFirstToken(admitted.tier, admitted.spec.num_tokens, timeout)
        try:
            async with timeout:
                self._pending[pending] = None
                self._watch(pending)
                return await anext(tokens)
        except TimeoutError:
            if not timeout.expired():
                raise
            if pending.refusal is None:
                return None
            raise self._refused(pending.refusal, admitted.tier) from None
        finally:
            del self._pending[pending]
            if pending.alarm is not None:
                pending.alarm.cancel()

    def _watch(self, pending: _PendingFirstToken) -> None:
        low = self._worker.policy.low_priority
        late: Tier = "low" if low.past_threshold == "Shed" else "normal"
        if low.threshold_milliseconds is not None and pending.tier == late:
            pending.alarm = asyncio.get_running_loop().call_later(
                low.threshold_milliseconds / 1000.0, self._too_long, pending
            )

    def _too_long(self, pending: _PendingFirstToken) -> None:
        """A request has waited too long: unless it waits alone, it makes room for the others."""
        if len(self._pending) == 1:
            self._watch(pending)
        elif pending.is_over:
            return
        elif pending.tier == "low":
            milliseconds = self._worker.policy.low_priority.threshold_milliseconds or 0.0
            message = (
                f"low priority: no first token in {milliseconds:g} ms "
                "(qos.lowPriority.thresholdMilliseconds): retry later"
            )
            pending.end(LoadRefusal("waited_too_long", message, self._retry_after()))
        else:
            pending.end()

    def degraded(self, spec: RequestSpec, prefill: PrefillMode) -> AdmittedRequest:
        """A request as it may run now; one of low priority may lose something.

        Raises RequestError for a forced remote prefill that its priority bars.
        """
        policy, tier = self._worker.policy, tier_of(spec.priority)
        if tier != "low" or spec.output:
            return AdmittedRequest(spec, prefill, since=time.monotonic())
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
        return AdmittedRequest(spec, prefill, since=time.monotonic(), lost=tuple(lost))

    def demoted(self, admitted: AdmittedRequest) -> AdmittedRequest:
        spec = aged(admitted.spec, time.monotonic() - admitted.since)
        spec = replace(spec, request_id=spec.request_id + _DEMOTED, priority=PRIORITIES["low"])
        self._count_lost(["priority=low"], admitted.tier)
        low = self.degraded(spec, admitted.prefill)
        return replace(low, lost=(*admitted.lost, "priority=low", *low.lost))

    def _count_lost(self, lost: Sequence[str], tier: Tier) -> None:
        for what in lost:
            add_event("degraded", what=what)
            self._worker.metrics.qos_degraded.labels(what.partition("=")[0], tier).inc()

    def _refused(self, refusal: LoadRefusal, tier: Tier) -> RequestError:
        seconds = refusal.retry_after_seconds
        add_event("refused", reason=refusal.code, retry_after_seconds=seconds)
        self._worker.metrics.qos_rejected.labels(refusal.code, tier).inc()
        return RequestError(
            refusal.message,
            status=TOO_MANY_REQUESTS,
            code=refusal.code,
            retry_after_seconds=seconds,
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

    def _retry_after(self) -> int:
        seconds = self._averages.prompt_token_seconds
        return retry_after(None if seconds is None else self.waiting_tokens * seconds)


def _or_nan(seconds: float | None) -> float:
    return math.nan if seconds is None else seconds
