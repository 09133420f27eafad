"""Situations of one PDCluster: a name, its object, and the state that the operator sees.

Object chat has one prefill worker and two decode workers, as in revision A; `NEXT` differs by a
setting of the engine, and so is revision B.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.golden.operator import operator_adapter as of
from tests.golden.operator.operator_adapter import Document, Observed, as_declared, identity
from tests.schema.object_cases import at, minimal

Scene = tuple[Document, Observed]


def chat(changes: Mapping[str, Any] | None = None) -> Document:
    """Object chat.  changes: by dotted path below spec"""
    document = minimal()
    for path, value in {"roles.decode.pools.0.replicas": 2, **(changes or {})}.items():
        at(f"spec.{path}", value)(document)
    return document


CHAT, NEXT = chat(), chat({"engine.maxSequences": 65})
RECREATE = chat({"engine.maxSequences": 65, "rollout.strategy": "Recreate"})
A, B = of.revision(CHAT), of.revision(NEXT)
PREFILL, DECODE = identity(A, "prefill"), identity(A)
READY = of.reported(CHAT, as_declared(CHAT))["status"]
LONG_AGO = "2026-01-01T00:00:00Z"
ROUTED = chat({"roles.router": {"pools": [{"name": "cpu", "replicas": 2}]}})
MIXED = chat({"roles": {"mixed": {"pools": [{"name": "cpu", "replicas": 3}]}}})
SCALED = chat({"autoscale": {"mode": "On", "budget": {"total": 8}}})
TWO_POOLS = chat({"roles.decode.pools": [{"name": name, "replicas": 2} for name in ("a", "b")]})
B200 = chat({"roles.decode.pools.0.gpu": "B200", "roles.decode.engine": {"device": "auto"}})
BUDGETED = chat({"engine.maxSequences": 65, "autoscale": {"mode": "On", "budget": {"total": 4}}})


def with_decode(*pods: Any, ready: int = 0, desired: int = 2, **fields: Any) -> Observed:
    """Prefill as declared, decode with these pods."""
    keys = {"current", "updated", "fault", "gone"} & fields.keys()
    state = {key: fields.pop(key) for key in keys}
    decode = of.workload(DECODE, desired, ready, pods=pods, **state)
    return as_declared(CHAT, workloads=[of.workload(PREFILL, 1), decode], **fields)


def failing(reason: str, message: str, since: str | None = None) -> Scene:
    """One of two decode workers does not get ready."""
    pod = of.pod_state(DECODE, 1, ready=False, problem=of.Problem(reason, message), since=since)
    return CHAT, with_decode(of.pod_state(DECODE, 0), pod, ready=1)


def beside(new_ready: int, **fields: Any) -> Observed:
    """Revision A whole, and B with so many ready decode workers."""
    new = [
        of.workload(identity(B, "prefill"), 1),
        of.workload(identity(B), 2, new_ready, pods=fields.pop("pods", ())),
    ]
    seen = as_declared(CHAT, **{"status": READY, **fields})
    return replace(seen, workloads=[*seen.workloads, *new])


def stalled(document: Document, pods: int) -> Observed:
    """A roll out to revision B that has not come forward for a day."""
    crashing = [of.failing_pod(identity(B), each, "CrashLooping") for each in range(pods)]
    seen = beside(2 - pods, pods=tuple(crashing), generation=2)
    begun = of.reported(document, seen, LONG_AGO)["status"]
    return replace(seen, status=begun)


def left_over(since: str) -> Scene:
    """Recreate, and one pod of revision A that should be gone by then."""
    state = of.workload(DECODE, 0, 0, current=1, gone=True, pods=(ending(1, since),))
    return RECREATE, as_declared(CHAT, workloads=[state], status=READY, generation=2)


def ending(ordinal: int, since: str) -> Any:
    return of.pod_state(DECODE, ordinal, ready=False, terminating=True, node="n1", since=since)


def etcd(managed: bool, ready: int = 0, desired: int = 0, **fields: Any) -> Scene:
    return CHAT, as_declared(CHAT, discovery=of.DiscoveryState(managed, ready, desired, **fields))


def records(document: Document = CHAT, **fields: Any) -> Scene:
    """Every pod has a record that says ready, but for these fields."""
    seen = as_declared(document)
    names = [pod.name for state in seen.workloads for pod in state.pods]
    known = {"states": dict.fromkeys(names, "ready"), **fields}
    return document, replace(seen, worker_records=of.WorkerRecords(**known))


def working_together(*of_decode: Any) -> Scene:
    pods = [f"{DECODE.name}-{ordinal}" for ordinal in range(len(of_decode))]
    return records(disaggregation=dict(zip(pods, of_decode, strict=True)))


def verified(fault: str | None = None, document: Document = CHAT, **fields: Any) -> Scene:
    outcome = of.PairVerification(
        A, of.NOW, fault=fault, decode_worker="d-0", prefill_worker="p-0", transport="tcp", **fields
    )
    found = of.PairVerifications({of.PoolPair("cpu", "cpu"): outcome})
    return document, as_declared(CHAT, verifications=found)


def decided(document: Document, decode: int, *problems: Any, **fields: Any) -> Scene:
    """A decision of the autoscaler in this reconcile."""
    step = of.DecisionStep("pool", "decode/cpu", 2, decode, "the cheapest pool")
    read = of.DecisionInput("decode", "num_requests_waiting", 40.0, 16.0)
    found = of.ScalingDecision(
        {("prefill", "cpu"): 1, ("decode", "cpu"): decode}, (read,), (step,), problems, of.AT
    )
    return document, as_declared(CHAT, decision=found, **fields)


def draining() -> Scene:
    """Decode goes from two workers to one; the other drains."""
    last = f"{DECODE.name}-1"
    scalers = [of.scaler("prefill", 1, 1), of.scaler("decode", 1, 2)]
    _, seen = records(
        states={f"{DECODE.name}-0": "ready", last: "draining"},
        commands=frozenset([last]),
        requested={last: 12.0},
    )
    return CHAT, replace(seen, scalers=scalers, status=READY)


MOVED: dict[str, Any] = {
    "num_tokens": 8,
    "num_bytes": 11_800_000,
    "bytes_per_second": 1_200_000_000,
}
REFUSES = of.WorkerDisaggregation("tcp", (("p-0", "KV geometry differs: set model.dtype"),), 1)
SHORT = of.Problem("CapacityShort", "decode: B200 is short of 2 workers")
WRONG = chat({"engine.blocksize": 16, "roles.decode.pools.0.gpu": "B900"})
FOREIGN = of.WriteFailure("Service chat", "NameTaken", "it belongs to another owner; rename one")
FORBIDDEN = of.WriteFailure("PodMonitor chat", "Forbidden", "the operator may not create it")
KEY_MISSING = of.Problem("ConfigurationRefused", "Secret keys: no key api-key; add it")
QUOTA = of.Problem("QuotaExceeded", "quota gpus: used 8, limited 8; raise it or lower replicas")

SCENES: dict[str, Scene] = {
    "fresh": (CHAT, of.Observed(1, {}, of.DiscoveryState(managed=True, desired=1))),
    "ready": (CHAT, as_declared(CHAT)),
    "ready, looked at again": (CHAT, as_declared(CHAT, status=READY)),
    "ready with routers": (ROUTED, as_declared(ROUTED)),
    "ready and mixed": (MIXED, as_declared(MIXED)),
    "nothing declared": (
        chat({"roles.decode.pools.0.replicas": 0, "roles.prefill.pools.0.replicas": 0}),
        with_decode(desired=0),
    ),
    "starting": (CHAT, with_decode(*(of.pod_state(DECODE, n, ready=False) for n in (0, 1)))),
    "engine loads": (
        CHAT,
        with_decode(of.pod_state(DECODE, 0, ready=False, loading="pod 0: its engine runs")),
    ),
    "image not pulled": failing("ImageNotPulled", "pod x: image 'w:1' cannot be pulled"),
    "configuration refused": failing("ConfigurationRefused", "pod x: num_blocks: too many"),
    "crash looping": failing("CrashLooping", "pod x: ended with exit code 1"),
    "accelerator unusable": failing("AcceleratorUnusable", "pod x: no CUDA device"),
    "downloading model": failing("DownloadingModel", "pod x: 3 of 9 files"),
    "model not downloaded": failing("ModelNotDownloaded", "pod x: the hub says 404"),
    "unschedulable": failing("Unschedulable", "pod x: 0/3 nodes are available", LONG_AGO),
    "no quota": (CHAT, with_decode(current=0, fault=QUOTA)),
    "one pool short of another": (
        TWO_POOLS,
        as_declared(
            TWO_POOLS,
            workloads=[
                of.workload(identity(of.revision(TWO_POOLS), "prefill"), 1),
                of.workload(identity(of.revision(TWO_POOLS), name="a"), 2, 3),
                of.workload(identity(of.revision(TWO_POOLS), name="b"), 2, 1),
            ],
        ),
    ),
    "scaled up": (
        CHAT,
        as_declared(CHAT, status=READY, scalers=[of.scaler("decode", 4, 2, "kubectl")]),
    ),
    "scaled beyond maxReplicas": (
        chat({"roles.decode.pools.0.maxReplicas": 2}),
        as_declared(CHAT, scalers=[of.scaler("decode", 7, 2)]),
    ),
    "draining": draining(),
    "node lost": (CHAT, with_decode(ending(0, LONG_AGO), of.pod_state(DECODE, 1), ready=1)),
    "pod ends on time": (CHAT, with_decode(ending(0, of.NOW), of.pod_state(DECODE, 1), ready=1)),
    "etcd starts": etcd(True, 1, 3, error="no quorum"),
    "etcd unreachable": etcd(False, error="etcd a:2379 refuses"),
    "etcd full": etcd(True, 3, 3, is_full=True),
    "etcd full in memory": etcd(True, 1, 1, is_full=True, in_memory=True),
    "etcd image not pulled": etcd(True, 0, 1, problem=of.Problem("ImageNotPulled", "pod e")),
    "BlueGreen begins": (NEXT, as_declared(CHAT, status=READY, generation=2)),
    "BlueGreen under way": (NEXT, beside(1, generation=2)),
    "BlueGreen switches": (NEXT, beside(2, generation=2)),
    "BlueGreen over budget": (BUDGETED, as_declared(CHAT, status=READY, generation=2)),
    "BlueGreen stalls and is given up": (NEXT, stalled(NEXT, 2)),
    "Recreate begins": (RECREATE, as_declared(CHAT, status=READY, generation=2)),
    "Recreate waits": left_over(of.NOW),
    "Recreate without a lost pod": left_over(LONG_AGO),
    "pool replaced": (
        chat({"roles.decode.pools.0.name": "new"}),
        as_declared(CHAT, status=READY, generation=2),
    ),
    "rejected": (WRONG, as_declared(CHAT, status=READY, generation=2)),
    "rejected at first": (WRONG, of.Observed(1, {}, of.DiscoveryState(managed=True))),
    "foreign child": (CHAT, as_declared(CHAT, failures=[FOREIGN, FORBIDDEN])),
    "API key missing": (CHAT, as_declared(CHAT, key_fault=KEY_MISSING)),
    "records without pods": records(states={"ghost": "ready"}, mismatched={"ghost": 999.0}),
    "records unreadable": records(states={}, error="etcd does not answer", again_seconds=5.0),
    "accelerators in use": records(
        B200,
        devices={f"{identity(of.revision(B200)).name}-0": of.WorkerDevice("cuda", "NVIDIA B200")},
    ),
    "accelerators idle": records(
        B200,
        devices={f"{identity(of.revision(B200)).name}-0": of.WorkerDevice("cpu", "Xeon", "no GPU")},
    ),
    "offloading": working_together(
        of.WorkerDisaggregation("tcp", long_prompts=30, remote_ratio=1.0, bytes_per_second=10**9)
    ),
    "pair refused": working_together(REFUSES, of.WorkerDisaggregation("tcp")),
    "no long prompts": working_together(
        of.WorkerDisaggregation("tcp"), of.WorkerDisaggregation("tcp")
    ),
    "not offloading": working_together(
        of.WorkerDisaggregation("tcp", long_prompts=90, remote_ratio=0.0)
    ),
    "transfer verified": verified(has_checksum=True, **MOVED),
    "transfer slow": verified(document=chat({"placement": {"minTransferGBps": 9}}), **MOVED),
    "transfer damaged": verified("damaged", message="the checksums differ"),
    "transfer failed": verified("unreachable", message="no answer within 10 s"),
    "autoscaled": decided(SCALED, 3),
    "autoscaled, short of capacity": decided(SCALED, 2, SHORT),
    "autoscaled, and scaled by hand": (
        SCALED,
        as_declared(
            CHAT,
            status=of.reported(*decided(SCALED, 3))["status"],
            scalers=[of.scaler("prefill", 1, 1), of.scaler("decode", 7, 2, "kubectl")],
        ),
    ),
    "advised": decided(chat({"autoscale": {"mode": "Advise", "budget": {"total": 8}}}), 3),
}
