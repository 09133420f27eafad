"""Further situations of one PDCluster, of which the conditions alone are recorded."""

from dataclasses import replace
from typing import Any

from tests.golden.operator import operator_adapter as of
from tests.golden.operator.operator_adapter import as_declared, identity
from tests.golden.operator.status_scenes import (
    B200,
    CHAT,
    DECODE,
    LONG_AGO,
    NEXT,
    PREFILL,
    READY,
    RECREATE,
    SCALED,
    SHORT,
    B,
    Scene,
    beside,
    chat,
    decided,
    ending,
    etcd,
    records,
    stalled,
    verified,
    with_decode,
    working_together,
)

ETCD_POD = of.Problem("ImageNotPulled", "pod chat-etcd-0: image 'etcd' cannot be pulled")
UNREADABLE = of.Problem("Forbidden", "Secret keys cannot be read")
MISSING = of.Problem("ConfigurationRefused", "Secret keys does not exist")
EMPTY = {"roles.prefill.pools.0.replicas": 0, "roles.decode.pools.0.replicas": 0}
OWN_TYPE = chat(
    {
        "accelerators": {"epyc": {}},
        "roles.decode.pools.0.gpu": "epyc",
        "roles.decode.engine": {"device": "auto"},
    }
)
B200_ON_CPU = chat({"roles.decode.pools.0.gpu": "B200", "roles.decode.engine": {"device": "cpu"}})
UNUSABLE = of.Problem("AcceleratorUnusable", "pod p: pool cpu asks for cuda")
HOLD_NOTHING = "it serves, and 8 x NVIDIA B200 of its container hold nothing"
NO_GPUS = "vLLM does not say it, and nvidia-smi: No devices were found"
TIERED = chat({"engine": {"kvTiers": [{"type": "host", "size": "1Gi"}]}})
RATE_FLOOR = chat({"placement": {"minTransferGBps": 10}})


def fails(ordinal: int, reason: str, message: str = "it fails", of_id: Any = DECODE) -> Any:
    return of.failing_pod(of_id, ordinal, reason, message)


def leaving(*pods: Any, current: int = 2, document: Any = RECREATE, of_id: Any = DECODE) -> Scene:
    """Only pods of an older revision, which have to end."""
    state = of.workload(of_id, 0, 0, current=current, gone=True, pods=pods)
    return document, as_declared(CHAT, workloads=[state])


def loading(*ordinals: int) -> Scene:
    pods = [
        of.pod_state(DECODE, each, ready=False, loading=f"pod {each}: its engine runs")
        for each in ordinals
    ]
    return CHAT, with_decode(*pods)


def computing(kind: str, name: str = "", note: str = "", document: Any = B200) -> Scene:
    """The first decode worker says what it computes on."""
    pod = f"{identity(of.revision(document)).name}-0"
    return records(document, devices={pod: of.WorkerDevice(kind, name, note)})


def tiers(*stopped: tuple[str, str]) -> Scene:
    """The first decode worker says which of its tiers do not work."""
    pod = f"{identity(of.revision(TIERED)).name}-0"
    return records(TIERED, stopped_tiers={pod: stopped})


def not_usable(document: Any, **fields: Any) -> Scene:
    of_id = identity(of.revision(document))
    pods = (of.pod_state(of_id, 0, ready=False, problem=UNUSABLE),)
    states = [
        of.workload(identity(of_id.revision, "prefill"), 1),
        of.workload(of_id, 2, 1, pods=pods),
    ]
    return document, as_declared(document, workloads=states, **fields)


def busy(num_long: int, ratio: float) -> Any:
    return of.WorkerDisaggregation("tcp", long_prompts=num_long, remote_ratio=ratio)


def without_prefill(scene: Scene) -> Scene:
    document, seen = scene
    prefill, decode = seen.workloads
    pods = tuple(replace(pod, ready=False) for pod in prefill.pods)
    return document, replace(seen, workloads=[replace(prefill, ready=0, pods=pods), decode])


def stale(names: str, pods: str = "", **worker_records: Any) -> Scene:
    """Records of these names and ready pods of those, each for a long time."""
    document, seen = records(
        states=dict.fromkeys(names, "ready"), mismatched=dict.fromkeys(names + pods, 999.0)
    )
    states = [
        replace(state, pods=of.pod_states(state.id, each))
        for state, each in zip(seen.workloads, (pods[:1], pods[1:]), strict=True)
    ]
    return document, replace(seen, workloads=states)


def draining(*names: int, serving: bool = True, **known: Any) -> Scene:
    """Decode is to go from four workers to two.  names: those whose drain was asked for; serving:
    whether the two that stay are ready
    """
    seen = as_declared(chat({"roles.decode.pools.0.replicas": 4}))
    prefill, decode = seen.workloads
    pods = [replace(pod, ready=serving or n > 1) for n, pod in enumerate(decode.pods)]
    asked = {pods[each].name: 90.0 for each in names}
    states = {pod.name: "draining" if pod.name in asked else "ready" for pod in pods}
    facts = {"states": states, "commands": frozenset(asked), "requested": asked, **known}
    return CHAT, replace(
        seen,
        workloads=[prefill, replace(decode, ready=4 if serving else 2, pods=tuple(pods))],
        status=READY,
        scalers=[of.scaler("prefill", 1, 1), of.scaler("decode", 2, 2)],
        worker_records=of.WorkerRecords(**facts),
    )


def stalled_alone(**fields: Any) -> Scene:
    """A roll out that came to nothing while the old revision answers nothing either."""
    down = with_decode(*(of.pod_state(DECODE, each, ready=False) for each in (0, 1)), status=READY)
    new = [of.workload(identity(B, "prefill"), 1), of.workload(identity(B), 2, 0)]
    seen = replace(down, workloads=[*down.workloads, *new], generation=2, **fields)
    return NEXT, replace(seen, status=of.reported(NEXT, seen, LONG_AGO)["status"])


def given_up() -> Scene:
    """The look after the one that gives a roll out up: its workers are gone."""
    seen = stalled(NEXT, 2)
    status = of.reported(NEXT, seen)["status"]
    gone = [of.workload(identity(B, role), 0) for role in ("prefill", "decode")]
    return NEXT, replace(seen, status=status, workloads=[*seen.workloads[:2], *gone])


def stalled_at_first() -> Scene:
    seen = with_decode(*(of.pod_state(DECODE, each, ready=False) for each in (0, 1)))
    seen = replace(seen, service_revision=None)
    return CHAT, replace(seen, status=of.reported(CHAT, seen, LONG_AGO)["status"])


def routed(routers: int, decode: int, declared: int = 2, **fields: Any) -> Scene:
    pools = [{"name": "cpu", "replicas": declared}]
    document = chat({"roles.router": {"pools": pools}, "roles.decode.pools.0.replicas": 1})
    sizes = {"prefill": (1, 1), "decode": (1, decode), "router": (declared, routers)}
    states = [
        of.workload(identity(of.revision(document), role), size, ready)
        for role, (size, ready) in sizes.items()
    ]
    return document, as_declared(document, workloads=states, **fields)


def with_note() -> Scene:
    document, seen = records()
    names = [pod.name for state in seen.workloads[1:] for pod in state.pods]
    note = "vLLM 0.99.1 is not known here: use 0.30 to 0.33"
    devices = dict.fromkeys(names, of.WorkerDevice("cpu", "cpu", engine_note=note))
    return document, replace(seen, worker_records=of.WorkerRecords({}, devices=devices))


def scaled(replicas: int, declared: int = 2, **bounds: Any) -> Scene:
    """A scaler that asks for more or fewer workers than it gets."""
    pool = {f"roles.decode.pools.0.{name}": value for name, value in bounds.items()}
    return chat(pool), as_declared(CHAT, scalers=[of.scaler("decode", replicas, declared)])


def many_pools() -> Scene:
    least = [{"name": f"p{each}", "replicas": 1024, "minReplicas": 1024} for each in range(3)]
    document = chat({"roles.decode.pools": [*least, {"name": "more", "replicas": 1}]})
    more = replace(of.scaler("decode", 1024, 1), pool="more")
    return document, as_declared(document, scalers=[more])


def many_pairs(fault: str | None = None) -> Scene:
    """A prefill pool whose KV moved, or not, to each of many decode pools."""
    document = chat({"roles.decode.pools": [{"name": f"p{n}", "replicas": 1} for n in range(9)]})
    found = of.PairVerification(
        of.revision(document),
        of.NOW,
        fault=fault,
        decode_worker="d",
        prefill_worker="p",
        transport="tcp",
        message="the checksums differ",
        num_tokens=8,
    )
    pairs = {of.PoolPair("cpu", f"p{n}"): found for n in range(9)}
    return document, as_declared(document, verifications=of.PairVerifications(pairs))


SCENES: dict[str, Scene] = {
    "three etcd members": etcd(True, 3, 3),
    "two of three etcd members": etcd(True, 2, 3),
    "an etcd that times out": etcd(True, 1, 1, error="timeout"),
    "an external etcd": etcd(False),
    "an external etcd, full": etcd(False, is_full=True),
    "an external etcd, full and gone": etcd(False, error="etcd a:2379 is gone", is_full=True),
    "an etcd member cannot start": etcd(True, 2, 3, problem=ETCD_POD),
    "no prefill worker": without_prefill((CHAT, as_declared(CHAT))),
    "no Service": (CHAT, as_declared(CHAT, service_revision=None)),
    "no API keys": (CHAT, as_declared(CHAT, key_fault=MISSING)),
    "no API keys for the next revision": (NEXT, as_declared(CHAT, key_fault=MISSING)),
    "API keys cannot be read": (CHAT, as_declared(CHAT, key_fault=UNREADABLE)),
    "pods fail for several reasons": (
        chat({"roles.decode.pools.0.replicas": 3}),
        with_decode(
            fails(0, "Unschedulable", "no node"),
            fails(2, "ImageNotPulled", "not found"),
            fails(1, "ImageNotPulled", "denied"),
            desired=3,
            scalers=[of.scaler("prefill", 1, 1), of.scaler("decode", 3, 3)],
        ),
    ),
    "engines load": loading(3, 1, 0),
    "scaled down": (
        CHAT,
        as_declared(
            CHAT, status=READY, scalers=[of.scaler("prefill", 1, 1), of.scaler("decode", 1, 2)]
        ),
    ),
    "a roll out fails": (
        NEXT,
        beside(1, pods=(fails(0, "ConfigurationRefused", "num_blocks: too many", identity(B)),)),
    ),
    "a roll out waits for etcd": (
        NEXT,
        beside(2, discovery=of.DiscoveryState(managed=False, error="etcd is gone")),
    ),
    "Recreate waits for pods": leaving(),
    "Recreate waits for a named pod": leaving(ending(4, of.NOW), ending(1, of.NOW)),
    "Recreate waits for an unfinished target": leaving(
        current=1,
        document=chat({"engine.maxSequences": 66, "rollout.strategy": "Recreate"}),
        of_id=identity(B),
    ),
    "Recreate to nothing": leaving(
        document=chat({"engine.maxSequences": 65, "rollout.strategy": "Recreate", **EMPTY})
    ),
    "pods keep the place of others": (
        CHAT,
        as_declared(
            CHAT,
            workloads=[
                of.workload(PREFILL, 1),
                of.workload(
                    DECODE,
                    0,
                    current=2,
                    gone=True,
                    pods=(ending(4, of.NOW), ending(1, of.NOW)),
                ),
            ],
        ),
    ),
    "a failure and what waits for it": (
        CHAT,
        as_declared(
            CHAT,
            failures=[
                of.WriteFailure("Deployment chat-etcd", "NameTaken", "waits for x", waits=True),
                of.WriteFailure("ServiceAccount chat-pdc", "NameTaken", "it is of another"),
            ],
        ),
    ),
    "on a GPU, with a note": computing("cuda", "NVIDIA B200", "not tested on this GPU"),
    "on the CPU as asked": computing("cpu", "Xeon", document=B200_ON_CPU),
    "on the CPU of a type without a resource": computing("cpu", "Xeon", document=OWN_TYPE),
    "on a CPU while GPUs hold nothing": computing("cpu", "cpu", HOLD_NOTHING),
    "on an unknown device": computing("unknown", "", NO_GPUS),
    "no worker has said its device": records(B200),
    "devices not looked at": (B200, as_declared(B200, worker_records=None)),
    "devices while etcd is away": records(B200, states={}, error="etcd does not answer"),
    "tiers work": records(TIERED),
    "tiers that do not work": tiers(("shared", "Connection refused"), ("disk", "No space left")),
    "tiers while etcd is away": records(TIERED, states={}, error="etcd does not answer"),
    "no accelerator for the worker": not_usable(B200),
    "no accelerator of an own type": not_usable(OWN_TYPE),
    "prefill by prefill workers, mostly": working_together(
        replace(busy(30, 1.0), bytes_per_second=1_200_000_000), busy(10, 0.5)
    ),
    "no prompt was long": working_together(busy(0, 0.0)),
    "few local prefills": working_together(busy(1, 0.0)),
    "no long prompt found a prefill worker": working_together(busy(50, 0.0), busy(50, 0.0)),
    "no prefill worker for long prompts": without_prefill(working_together(busy(50, 0.0))),
    "transfer rate under the floor": verified(
        document=RATE_FLOOR, num_tokens=8, num_bytes=11_800_000, bytes_per_second=1_200_000_000
    ),
    "transfer rate not measured": verified(document=RATE_FLOOR, num_tokens=8, num_bytes=9),
    "transfer not verified, workers are busy": (
        CHAT,
        as_declared(
            CHAT,
            verifications=of.PairVerifications(
                {}, {of.PoolPair("cpu", "cpu"): "d-0 has other requests"}
            ),
        ),
    ),
    "an engine of an unknown version": with_note(),
    "most records have no pod": stale("abc", "pa"),
    "ready pods have no record": stale("", "pbcde"),
    "scaled under minReplicas": scaled(0, minReplicas=1),
    "scaled over what a pool may have": scaled(5000),
    "scaled over what an object may have": many_pools(),
    "two workers drain": draining(2, 3),
    "workers drain while etcd is away": draining(states={}, error="etcd does not answer"),
    "workers serve until others are ready": draining(serving=False),
    "routers without a decode worker": routed(2, 0),
    "no router is ready": routed(0, 1),
    "no routers are asked for": routed(0, 1, 0, service_role="decode"),
    "a roll out comes to nothing, and nothing serves": stalled_alone(),
    "a roll out was given up": given_up(),
    "a roll out comes to nothing, and a write is refused": stalled_alone(
        failures=[of.WriteFailure("PDPoolScaler chat-decode-cpu", "ApplyFailed", "no answer")]
    ),
    "a first install comes to nothing": stalled_at_first(),
    "a roll out is dropped": (
        CHAT,
        as_declared(CHAT, status=of.reported(NEXT, as_declared(CHAT, status=READY))["status"]),
    ),
    "replicas in the file while it is autoscaled": (
        chat(
            {
                "autoscale": {"mode": "On", "budget": {"total": 8}},
                "roles.decode.pools.0.replicas": 6,
            }
        ),
        as_declared(
            CHAT,
            status=of.reported(*decided(SCALED, 3))["status"],
            scalers=[of.scaler("prefill", 1, 1), of.scaler("decode", 3, 2)],
        ),
    ),
    "two problems of the autoscaler": decided(
        SCALED, 2, of.Problem("MetricsMissing", "prefill: none"), SHORT
    ),
    "many pairs of pools": many_pairs(),
    "many pairs of pools, and no KV moves": many_pairs("damaged"),
    "a roll out over two budgets": (
        chat(
            {
                "engine.maxSequences": 65,
                "autoscale": {"mode": "On", "budget": {"total": 4, "perGpu": {"cpu": 5}}},
            }
        ),
        as_declared(CHAT, status=READY),
    ),
}
