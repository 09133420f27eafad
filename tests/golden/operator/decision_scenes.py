"""Situations of the autoscaler, of which the sentences of its decision are recorded."""

from dataclasses import replace
from typing import Any

from tests.golden.operator.operator_adapter import Holding, Memory, PoolFacts
from tests.operator.pdcluster_api.plan.autoscale import worlds
from tests.operator.pdcluster_api.plan.autoscale.worlds import (
    CALM,
    IDLE,
    NOW,
    agreed,
    facts_of,
    make_spec,
    observed,
    pool,
    see,
)

HOT = replace(CALM, engine_busy_ratio=0.95)
FULL = replace(CALM, kv_cache_usage_ratio=0.9)
QUEUE = replace(CALM, num_requests_waiting=20.0)
B200 = [pool(4, gpu="B200", minReplicas=1, maxReplicas=8)]
TWO = [*B200, pool(2, "h100", maxReplicas=8)]
ONE = {"prefill": [pool(1)], "decode": [pool(1)]}
EIGHT = pool(1, gpu="B200", gpusPerReplica=8)
SHORT = Memory(backoff={"B200": NOW + 600.0})
NIGHT = {
    "name": "night",
    "role": "decode",
    "pool": "x",
    "start": "00:00",
    "end": "00:00",
    "minReplicas": 8,
}


def waiting(number: int, top: int, seconds: float = 130.0, **fields: Any) -> dict[str, Any]:
    """Pods of a pool that no node takes."""
    none = {"unschedulable": number, "unschedulable_top": top, "unschedulable_seconds": seconds}
    return {**none, **fields}


def at(spec: Any, memory: Any = None, facts: dict[str, Any] | None = None, **workers: Any) -> Any:
    return see(spec, facts_of(spec, **(facts or {})), memory, **workers)


def uneven(peak: float) -> Any:
    """Idle decode workers but for one, for so long that the role would shrink."""
    spec = make_spec(scaleDown={"windowSeconds": 0})
    facts = facts_of(spec)
    windows = worlds.windows_of(facts, decode=IDLE)
    busy = [
        replace(
            each, workers=(replace(each.workers[0], kv_cache_usage_ratio=peak), *each.workers[1:])
        )
        for each in windows[worlds.D]
    ]
    return worlds.run(spec, facts, {**windows, worlds.D: busy})


def falling(per_second: float) -> Any:
    """A queue of 800 requests before prefill that was longer by so many a second."""
    spec = make_spec()
    facts = facts_of(spec)
    windows = worlds.windows_of(facts)
    rounds = []
    for sample in windows[worlds.P]:
        queue = 200.0 + per_second * (NOW - sample.at) / 4
        workers = (replace(each, prefill_queue_requests=queue) for each in sample.workers)
        rounds.append(replace(sample, workers=tuple(workers)))
    return worlds.run(spec, facts, {**windows, worlds.P: rounds})


def without_numbers(silent: int, rounds: int = 4, *, is_stale: bool = True, **workers: Any) -> Any:
    """The last of four decode workers do not answer, in so many of the newest rounds."""
    spec = make_spec(scaleDown={"windowSeconds": 0})
    facts = facts_of(spec)
    windows = worlds.windows_of(facts, **workers)
    names = [each.pod for each in windows[worlds.D][0].workers[4 - silent :]]
    left = [
        replace(each, workers=each.workers[: 4 - silent], stale=tuple(names) if is_stale else ())
        for each in windows[worlds.D][-rounds:]
    ]
    return worlds.run(spec, facts, {**windows, worlds.D: [*windows[worlds.D][:-rounds], *left]})


def new_to_load() -> Any:
    spec = make_spec()
    facts = facts_of(spec)
    queue = replace(CALM, prefill_queue_requests=50.0)
    return worlds.run(spec, facts, worlds.windows_of(facts, rounds=1, prefill=queue))


def advised_before() -> Any:
    spec = make_spec(mode="Advise", scaleDown={"windowSeconds": 100})
    memory = see(spec, decode=FULL).memory
    facts = facts_of(spec)
    return worlds.run(spec, facts, worlds.windows_of(facts, now=NOW + 50), memory, now=NOW + 50)


def demand() -> Any:
    """Show that the prompts that arrive keep prefill from shrinking by more."""
    prefill = replace(IDLE, prefill_token_rate=3000.0, prefill_busy_rate=0.3)
    ingress = {"request_rate": 10.0, "prompt_token_rate": 10_000.0, "prefill_token_rate": 1000.0}
    decode = replace(CALM, **ingress)
    spec = make_spec(lines={"prefill": {"ttftSeconds": 1.0}}, scaleDown={"maxStep": 9})
    latencies = {"decode": {"ttft": observed((10, 0.5))}}
    return agreed(spec, prefill=prefill, decode=decode, latencies=latencies)


def first_tokens(*requests: tuple[float, float], **prefill: float) -> Any:
    """Decide by the 90th percentile.  requests: of each round, as (number, seconds)"""
    spec = make_spec(objective={"ttft": {"percentile": 90, "seconds": 0.5}})
    latencies = {"decode": {"ttft": observed(*requests)}}
    return agreed(spec, prefill=replace(CALM, **prefill), latencies=latencies)


def rolling_out() -> Any:
    """Each revision holds its workers."""
    spec = make_spec(**ONE, budget={"total": 4})
    of = Holding(1, 1, (0,), grows=True)
    both = {"holdings": (of, replace(of, grows=False)), "current": 2, "ending": 1}
    beside = dict.fromkeys(("prefill", "decode"), both)
    return at(spec, facts=beside, decode=QUEUE)


def last_of_a_pool(**decode: Any) -> Any:
    schedules = [
        {**NIGHT, "name": "day", "pool": "day", "minReplicas": 4},
        {**NIGHT, "pool": "night", "minReplicas": 0, "maxReplicas": 0},
    ]
    pools = [pool(4, "night", maxReplicas=8), pool(0, "day", maxReplicas=8)]
    return at(make_spec(decode=pools, schedules=schedules), facts=decode)


GONE = {"replicas": 0, "current": 2, "ready": 0, "ending": 2}
LEFT = PoolFacts("decode", "old", "H100", replicas=0, current=1, ready=0, ending=1)
FIRST = make_spec(
    prefill=[pool(1, minReplicas=1)], decode=[pool(1, minReplicas=1)], budget={"total": 3}
)

SCENES: dict[str, Any] = {
    "nothing to do": see(make_spec()),
    "a late tail": first_tokens((34, 0.06), (6, 0.75)),
    "too few first tokens": first_tokens((4, 0.06), engine_busy_ratio=0.1),
    "first tokens that fewer workers would delay": first_tokens((40, 0.45), engine_busy_ratio=0.3),
    "a queue, and a headroom": at(
        make_spec(prefill=[pool(3)], lines={"prefill": {"headroom": 0.1}}),
        prefill=replace(CALM, prefill_queue_requests=7.69),
        decode=FULL,
    ),
    "busy, and a headroom over an equal need": at(
        make_spec(prefill=[pool(10)], lines={"prefill": {"headroom": 0.5}}),
        prefill=replace(CALM, engine_busy_ratio=0.64),
    ),
    "a queue that is worked off soon": falling(10.0),
    "a queue that is worked off late": falling(1.0),
    "numbers of workers that are new": new_to_load(),
    "workers on their way": at(
        make_spec(), facts={"decode": {"replicas": 6, "ready": 4}}, decode=FULL
    ),
    "a role that starts": at(make_spec(), facts={"prefill": {"replicas": 4, "ready": 0}}),
    "idle for a while": agreed(make_spec(), seconds=100.0, decode=IDLE),
    "idle for long": agreed(make_spec(), decode=IDLE),
    "idle, and some not ready": agreed(
        make_spec(), facts_of(make_spec(), decode={"replicas": 6, "ready": 4}), decode=IDLE
    ),
    "idle but for one": uneven(0.7),
    "near a threshold": see(make_spec(), decode=replace(CALM, kv_cache_usage_ratio=0.8)),
    "prompts that arrive": demand(),
    "advice that goes on": advised_before(),
    "no numbers at all": without_numbers(4),
    "one without numbers": without_numbers(1, decode=IDLE),
    "one that has yet to answer": without_numbers(1, 1, is_stale=False, decode=IDLE),
    "no bounds that can be": see(make_spec(decode=[pool(3, maxReplicas=3)], schedules=[NIGHT])),
    "a role of none": see(make_spec(prefill=[pool(0)], decode=[pool(2)])),
    "a pool's last worker, by schedule": last_of_a_pool(),
    "the cheaper of two pools": at(make_spec(prefill=TWO, cost={"B200": 3.0}), prefill=HOT),
    "accelerators of a worker": at(
        make_spec(prefill=[EIGHT], decode=[pool(1)], cost={"B200": 2.0}), prefill=HOT
    ),
    "the dearest of two pools": agreed(make_spec(prefill=TWO, cost={"B200": 3.0}), prefill=IDLE),
    "idle, and pods without a node": agreed(
        make_spec(prefill=TWO, capacitySeconds=10_000),
        facts_of(make_spec(prefill=TWO), prefill_h100=waiting(1, 1, replicas=2, ready=1)),
        prefill=IDLE,
    ),
    "pods that no node takes": at(
        make_spec(prefill=TWO), facts={"prefill_x": waiting(2, 2, replicas=4, ready=2)}, prefill=HOT
    ),
    "all pods of a role without a node": at(
        make_spec(prefill=B200),
        facts={"prefill": waiting(1, 0, replicas=1, ready=0)},
    ),
    "a type that was short": at(make_spec(prefill=B200), SHORT, prefill=HOT),
    "a type of large workers that is short": at(
        make_spec(prefill=[{**EIGHT, "replicas": 3}], decode=[pool(1)]),
        facts={"prefill": waiting(2, 2, ready=1)},
    ),
    "a type of workers of two sizes that is short": at(
        make_spec(prefill=[{**EIGHT, "replicas": 3}, pool(1, "y", gpu="B200")]),
        facts={"prefill_x": waiting(2, 2, ready=1)},
    ),
    "pods that cannot be made": at(
        make_spec(prefill=TWO),
        facts={"prefill_x": {"current": 2, "ready": 2, "fault": "exceeded quota: gpus"}},
        prefill=HOT,
    ),
    "a maximum": see(make_spec(decode=[pool(4, maxReplicas=5)], budget={"total": 8}), decode=QUEUE),
    "a budget": see(make_spec(budget={"total": 9, "perGpu": {"H100": 9}}), decode=QUEUE),
    "a budget, and pods that end": at(
        make_spec(budget={"total": 8}),
        facts={"prefill": {"replicas": 3, "current": 4, "ready": 3, "ending": 1}},
        decode=FULL,
    ),
    "a budget, and another revision": rolling_out(),
    "a budget for none": see(make_spec(prefill=[pool(0)], budget={"total": 4})),
    "a budget that was lowered": see(
        make_spec(prefill=[pool(4, minReplicas=4)], decode=[pool(8)], budget={"total": 9})
    ),
    "a budget under the roles": see(make_spec(**ONE, budget={"total": 1})),
    "a budget under the last ready worker": at(
        make_spec(prefill=[pool(1)], decode=[pool(3)], budget={"total": 2}),
        facts={"decode": {"replicas": 3, "ready": 1}},
    ),
    "a minimum that was raised": at(
        make_spec(decode=[pool(4, minReplicas=4)], budget={"total": 8}),
        facts={"prefill": {"current": 6, "ending": 2}, "decode": {"replicas": 2}},
    ),
    "a first worker without room": see(
        FIRST, [*facts_of(FIRST, prefill={"replicas": 0}, decode=GONE), LEFT]
    ),
    "a ratio": see(make_spec(prefill=[pool(2)], ratio={"min": 0.5}), decode=FULL),
    "a ratio out of bounds": see(
        make_spec(prefill=[pool(2, maxReplicas=3)], decode=[pool(10)], ratio={"min": 0.5})
    ),
    "a ratio that holds a role": see(
        make_spec(prefill=[pool(2, maxReplicas=2)], ratio={"min": 0.5}), decode=FULL
    ),
}
