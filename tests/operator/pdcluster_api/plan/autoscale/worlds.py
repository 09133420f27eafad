"""Small specs, facts and windows for the autoscaler, with what a test does not care about filled
in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.decide import decide
from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_api.plan.autoscale.values import (
    Clock,
    Memory,
    Outcome,
    PoolFacts,
    PoolSample,
    Windows,
    WorkerSample,
)
from pdcluster_api.plan.observed.state import DecisionStep, ScalingDecision
from pdcluster_schema.latency import LATENCY_BUCKETS
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.workload import PoolKey

NOON = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)  # a Wednesday
NOW = 10_000.0
P, D, M = ("prefill", "x"), ("decode", "x"), ("mixed", "x")

IDLE = WorkerSample(
    "",
    num_requests_running=0,
    num_requests_waiting=0,
    prefill_queue_requests=0,
    prefill_queue_tokens=0,
    kv_cache_usage_ratio=0,
    engine_busy_ratio=0,
)
CALM = replace(IDLE, kv_cache_usage_ratio=0.5, engine_busy_ratio=0.6)
"""A worker that neither asks for more nor for fewer."""

# Names of the rules, in the order in which they act
RULES = [each for name, each in vars(rules).items() if name.isupper() and isinstance(each, str)]


def pool(replicas: int, name: str = "x", **fields: Any) -> dict[str, Any]:
    return {"name": name, "replicas": replicas, "gpu": "H100", "maxReplicas": 1024, **fields}


def make_spec(
    *,
    prefill: Sequence[Mapping[str, Any]] = (),
    decode: Sequence[Mapping[str, Any]] = (),
    mixed: Sequence[Mapping[str, Any]] = (),
    lines: Mapping[str, Any] | None = None,
    **autoscale: Any,
) -> PDClusterSpec:
    """A spec with pools of both roles, or mixed ones; four workers each unless given, and steps of
    any size.

    lines: the roles' own sections of autoscale
    """
    roles = (
        {"mixed": mixed}
        if mixed
        else {"prefill": prefill or [pool(4)], "decode": decode or [pool(4)]}
    )
    spec = {
        "model": {"name": "tiny", "path": "/models/tiny"},
        "roles": {role: {"pools": [dict(each) for each in pools]} for role, pools in roles.items()},
        "autoscale": {"mode": "On", "scaleUp": {"maxStep": 0}, **(lines or {}), **autoscale},
    }
    return parse(
        {
            "apiVersion": "pdcluster.io/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "chat"},
            "spec": spec,
        }
    ).spec


def facts_of(spec: PDClusterSpec, **changes: Mapping[str, Any]) -> list[PoolFacts]:
    """Every pool as it is declared, all ready.  changes: fields by `role` or `role_pool`; replicas
    set current and ready too.
    """
    found = []
    for role, declared in spec.roles.present().items():
        for each in declared.pools:
            change = dict(changes.get(f"{role}_{each.name}") or changes.get(role) or {})
            number = change.get("replicas", each.replicas)
            found.append(
                PoolFacts(
                    **{
                        "role": role,
                        "pool": each.name,
                        "gpu": each.gpu,
                        "gpus_per_replica": spec.gpus_per_replica(role, each),
                        "replicas": number,
                        "current": number,
                        "ready": number,
                        **change,
                    }
                )
            )
    return found


def samples_of(
    facts: PoolFacts, worker: WorkerSample, number: int | None = None
) -> tuple[WorkerSample, ...]:
    names = sorted(
        f"{facts.role}-{facts.pool}-{ordinal}"
        for ordinal in range(facts.ready if number is None else number)
    )
    return tuple(replace(worker, pod=name) for name in names)


Latencies = Mapping[str, LatencyHistogram]


def observed(*requests: tuple[float, float]) -> LatencyHistogram:
    """requests: (number, seconds of each)"""
    return LatencyHistogram.of(LATENCY_BUCKETS, requests)


def windows_of(
    facts: Sequence[PoolFacts],
    *,
    now: float = NOW,
    rounds: int = 4,
    latencies: Mapping[str, Latencies] | None = None,
    **workers: WorkerSample,
) -> dict[PoolKey, list[PoolSample]]:
    """Some equal rounds of every pool, five seconds apart.  workers: by role or `role_pool`, else
    CALM; latencies: of each round, by role.
    """
    return {
        each.key: [
            PoolSample(
                now - 5.0 * back,
                samples_of(
                    each, workers.get(f"{each.role}_{each.pool}") or workers.get(each.role) or CALM
                ),
                latencies=(latencies or {}).get(each.role, {}),
            )
            for back in reversed(range(rounds))
        ]
        for each in facts
    }


def run(
    spec: PDClusterSpec,
    facts: Sequence[PoolFacts],
    windows: Windows,
    memory: Memory | None = None,
    *,
    now: float = NOW,
    wall: datetime = NOON,
) -> Outcome:
    outcome = decide(spec, facts, windows, memory or Memory(), Clock(now, wall))
    assert_explained(facts, outcome.decision)
    assert outcome.changed == any(
        outcome.decision.replicas.get(each.key, each.replicas) != each.replicas for each in facts
    )
    return outcome


def see(
    spec: PDClusterSpec,
    facts: Sequence[PoolFacts] | None = None,
    memory: Memory | None = None,
    latencies: Mapping[str, Latencies] | None = None,
    **workers: WorkerSample,
) -> Outcome:
    """One decision on workers that all show the same.  workers, latencies: as in `windows_of`."""
    facts = facts_of(spec) if facts is None else facts
    return run(spec, facts, windows_of(facts, latencies=latencies, **workers), memory)


def agreed(
    spec: PDClusterSpec,
    facts: Sequence[PoolFacts] | None = None,
    *,
    seconds: float = 300.0,
    latencies: Mapping[str, Latencies] | None = None,
    **workers: WorkerSample,
) -> Outcome:
    """The decision after so many seconds in which all stayed the same."""
    facts = facts_of(spec) if facts is None else facts
    memory, now = Memory(), NOW
    while True:
        windows = windows_of(facts, now=now, latencies=latencies, **workers)
        outcome = run(spec, facts, windows, memory, now=now)
        if now >= NOW + seconds:
            return outcome
        memory, now = outcome.memory, now + 5.0


def assert_explained(facts: Sequence[PoolFacts], decision: ScalingDecision) -> None:
    """Every change is said: steps of each pool, and then of each role, lead from the size before to
    the size after.
    """
    base = base_of(facts, decision)
    for key, size in base.items():
        of_pool = [
            step
            for step in decision.steps
            if step.subject == "/".join(key) and step.rule == rules.POOL
        ]
        assert_chain(size, of_pool, decision.replicas[key], decision)
    for role in {role for role, _ in base}:
        if all(key in base for key in decision.replicas if key[0] == role):
            before, after = (
                sum(sizes[key] for key in base if key[0] == role)
                for sizes in (base, decision.replicas)
            )
            assert_chain(
                before, [step for step in decision.steps if step.subject == role], after, decision
            )
    for step in decision.steps:
        assert step.why
        assert step.rule in RULES
    assert_order(decision)


def base_of(facts: Sequence[PoolFacts], decision: ScalingDecision) -> dict[PoolKey, int]:
    """The sizes from which the roles were decided: what is asked for, less what capacity, bounds
    and budget took before.
    """
    found = {each.key: each.replicas for each in facts if each.key in decision.replicas}
    for key, size in found.items():
        early = [
            step
            for step in decision.steps
            if step.subject == "/".join(key) and step.rule != rules.POOL
        ]
        found[key] = early[-1].after if early else size
        assert_chain(size, early, found[key], decision)
    return found


def assert_chain(
    size: int, steps: Sequence[DecisionStep], after: int, decision: ScalingDecision
) -> None:
    for step in steps:
        assert step.before == size, decision
        size = step.after
    assert size == after, decision


def assert_order(decision: ScalingDecision) -> None:
    """Rules act on a role in their order."""
    for role in {step.subject for step in decision.steps if "/" not in step.subject}:
        found = [
            RULES.index(step.rule)
            for step in decision.steps
            if step.subject == role and step.rule != rules.CAPACITY
        ]
        assert found == sorted(found), decision


def rules_of(outcome: Outcome, subject: str | None = None) -> list[str]:
    return [
        step.rule for step in outcome.decision.steps if subject is None or step.subject == subject
    ]


def step_of(outcome: Outcome, rule: str, subject: str | None = None) -> DecisionStep:
    return next(
        step
        for step in outcome.decision.steps
        if step.rule == rule and subject in (None, step.subject)
    )


def reasons(outcome: Outcome) -> list[str]:
    return [problem.reason for problem in outcome.decision.problems]
