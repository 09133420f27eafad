"""A cluster with routers whose pools may sleep, and rounds of scrapes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdcluster_api.plan.autoscale.values import Memory, Outcome, PoolFacts, WorkerSample
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDClusterSpec
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    IDLE,
    NOW,
    facts_of,
    pool,
    run,
    windows_of,
)

QUIET = replace(IDLE, request_rate=0.0, prompt_token_rate=0.0)
"""A worker without any request since the scrape before."""


def sleepy(
    *,
    routers: int = 2,
    prefill: Sequence[Mapping[str, Any]] = (),
    decode: Sequence[Mapping[str, Any]] = (),
    mixed: Sequence[Mapping[str, Any]] = (),
    **autoscale: Any,
) -> PDClusterSpec:
    """One worker of each role unless given; it may sleep after 60 s."""
    one = [pool(1, minReplicas=0)]
    roles = {"mixed": mixed} if mixed else {"prefill": prefill or one, "decode": decode or one}
    return parse(
        {
            "apiVersion": "pdcluster.io/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "chat"},
            "spec": {
                "model": {"name": "tiny", "path": "/models/tiny"},
                "roles": {
                    **{
                        role: {"pools": [dict(each) for each in pools]}
                        for role, pools in roles.items()
                    },
                    "router": {"pools": [{"name": "r", "replicas": routers}]},
                },
                "qos": {"admission": {"workerWaitSeconds": 300}},
                "autoscale": {"mode": "On", "scaleDown": {"windowSeconds": 60}, **autoscale},
            },
        }
    ).spec


def sleeping(spec: PDClusterSpec, **changes: Mapping[str, Any]) -> list[PoolFacts]:
    """Its facts at zero."""
    zeros = {role: {"replicas": 0} for role in spec.roles.computing()}
    return facts_of(spec, **{**zeros, **changes})


def held(number: float) -> WorkerSample:
    """A router that holds so many requests."""
    return replace(QUIET, held_requests=number)


def once(spec: PDClusterSpec, facts: Sequence[PoolFacts], **workers: WorkerSample) -> Outcome:
    """One decision, on workers that are quiet unless given."""
    return run(spec, facts, windows_of(facts, **{**quiet(spec), **workers}))


def quiet(spec: PDClusterSpec) -> dict[str, WorkerSample]:
    return {**dict.fromkeys(spec.roles.computing(), QUIET), "router": held(0.0)}


def after(
    seconds: float,
    spec: PDClusterSpec,
    facts: Sequence[PoolFacts] | None = None,
    memory: Memory | None = None,
    **workers: WorkerSample,
) -> Outcome:
    """The decision after so many seconds in which all stayed the same."""
    found, memory, now = facts_of(spec) if facts is None else facts, memory or Memory(), NOW
    while True:
        windows = windows_of(found, now=now, **{**quiet(spec), **workers})
        outcome = run(spec, found, windows, memory, now=now)
        if now >= NOW + seconds:
            return outcome
        memory, now = outcome.memory, now + 5.0
