"""Admission of requests at a decode worker: bounds of its queue, priorities, what low ones lose.

`serving.decode.admission_control` does the same beside its connections.
"""

from dataclasses import dataclass

from pdcluster_schema.policy import PolicyConfig
from pdcluster_simulator.requests import SimulatedRequest
from pdcluster_simulator.workers import ClusterWorker
from pdcluster_worker.routing.qos.load_shedding import (
    LatencySlo,
    LoadEstimate,
    degradation,
    full,
    pressure,
    refusal,
    tier_of,
)

QUEUE_FULL = "queue_full"


def shed_after(policy: PolicyConfig, request: SimulatedRequest) -> float | None:
    """Seconds after which a request without a first token is shed; None = it is not."""
    low = policy.low_priority
    is_shed = low.past_threshold == "Shed" and tier_of(request.priority) == "low"
    if not is_shed or low.threshold_milliseconds is None:
        return None
    return low.threshold_milliseconds / 1e3


def may_displace(policy: PolicyConfig, request: SimulatedRequest) -> bool:
    """Return whether it may take the place of one of low priority in a full queue."""
    return policy.early_rejection.enabled and tier_of(request.priority) == "high"


@dataclass(frozen=True, slots=True)
class Admitted:
    """output_tokens: of the answer, shortened or not; is_local: no prefill worker computes it."""

    output_tokens: int
    is_local: bool = False


def admit(policy: PolicyConfig, worker: ClusterWorker, request: SimulatedRequest) -> Admitted | str:
    """A code of `LoadRefusal`, or `QUEUE_FULL`, where it is refused."""
    tier = tier_of(request.priority)
    if tier == "low":
        slo, estimate = _slo(policy), _estimate(worker)
        refused = refusal(policy, tier, request.prompt_tokens, slo, estimate)
        if refused is not None:
            return refused.code
    if full(policy.admission, worker.num_waiting, worker.waiting_tokens, request.prompt_tokens):
        return QUEUE_FULL
    if tier != "low":
        return Admitted(request.output_tokens)
    loss = degradation(policy, tier, pressure(estimate, slo))
    most = loss.max_tokens or request.output_tokens
    return Admitted(min(most, request.output_tokens), loss.is_local)


def _slo(policy: PolicyConfig) -> LatencySlo:
    tpot = policy.slo.tpot_milliseconds
    return LatencySlo(policy.slo.ttft_milliseconds / 1e3, None if tpot is None else tpot / 1e3)


def _estimate(worker: ClusterWorker) -> LoadEstimate:
    """By moving averages: each prompt that waits, and a step of the streams."""
    if (measured := worker.meter.take()) is not None:
        worker.averages.refresh(measured)
    averages = worker.averages
    token_seconds = averages.prompt_token_seconds
    num_streams = worker.num_decoding
    step = averages.estimated_tpot_seconds(num_streams) or 0.0
    ends = averages.ends_per_second
    return LoadEstimate(
        ttft_seconds=(
            None if token_seconds is None else worker.waiting_tokens * token_seconds + step
        ),
        tpot_seconds=averages.estimated_tpot_seconds(num_streams + worker.num_waiting + 1),
        turn_seconds=1 / ends if ends else None,
    )
