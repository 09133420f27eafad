"""One object that a CEL rule lets through and one that it refuses, for each rule of the PDCluster
CRD.

Which rule refuses an object is not said here: `test_cel_rules` finds each rule's place and message
in the answers, so a rule without a case fails.
"""

from dataclasses import dataclass

from tests.apiserver.cel_flexible import FLEXIBLE_CASES
from tests.apiserver.cel_kv_tiers import list_cases
from tests.apiserver.cel_kv_tiers import role_cases as tier_cases
from tests.apiserver.cel_scheduling import OBJECT_CASES, Case, scheduling_cases
from tests.apiserver.cel_stock_engines import STOCK_CASES, role_cases
from tests.schema.object_cases import (
    CEILINGS,
    CPU,
    HUB,
    NIGHT,
    SLEEPS,
    VOLUME,
    Change,
    at,
    both,
    vllm,
    without,
)

ROLES = ("prefill", "decode", "mixed")
BIG = {"name": "big", "gpu": "B200", "replicas": 1}
EXCHANGED = (
    "an etcd of your own (discovery.etcd.endpoints) and one that is run for the cluster cannot be "
    "exchanged for each other:"
    " make a new PDCluster"
)
SAME: Change = lambda content: None  # noqa: E731 - a change like the others


@dataclass(frozen=True)
class Rule:
    """A rule about changes.

    field:   where it speaks, with [] for the entry of a list and {} for that of a map
    before:  the object as it was; `right` and `wrong` change that one
    """

    field: str
    message: str
    right: Change
    wrong: Change
    before: Change


ENGINELESS = ("router", "picker")
ATTAINED = at("spec.autoscale", {"mode": "Advise", "objective": {"ttft": {"seconds": 1.0}}})
BLUE_GREEN = at("spec.rollout.strategy", "BlueGreen")
OWN_PICKER = at("spec.service.endpointPicker", {})


def rolling(**fields: object) -> Change:
    return at("spec.rollout", {"strategy": "Rolling", **fields})


def not_rolling(**fields: object) -> Change:
    return at("spec.rollout", {"strategy": "BlueGreen", **fields})


def only(role: str) -> Change:
    """An object that has the role, and the others that it needs."""
    if role == "router":
        return at("spec.roles.router", {"pools": [CPU]})
    if role == "picker":
        return both(OWN_PICKER, at("spec.roles.picker", {"pools": [CPU]}))
    return at("spec.roles", {"mixed": {"pools": [CPU]}}) if role == "mixed" else SAME


def pool_rules(role: str) -> list[Case | Rule]:
    """Rules of the pools of every role, routers included."""
    pools = f"spec.roles.{role}.pools"
    first = f"{pools}.0"
    other = "cpu" if role in ENGINELESS else "H200"

    def bounds(replicas: int, low: int, high: int) -> Change:
        return both(
            only(role),
            at(
                pools,
                [{"name": "cpu", "replicas": replicas, "minReplicas": low, "maxReplicas": high}],
            ),
        )

    return [
        (bounds(2, 2, 2), bounds(2, 3, 2)),
        (bounds(1, 1, 3), bounds(0, 1, 3)),
        (bounds(3, 1, 3), bounds(4, 1, 3)),
        (
            both(only(role), at(f"{first}.name", "a-1")),
            both(only(role), at(f"{first}.name", "1-a")),
        ),
        Rule(
            f"{pools}[].gpu",
            "gpu of a pool cannot change: add a pool under another name, and remove this one",
            at(pools, [{**CPU, "gpu": "cpu"}, {"name": "other", "gpu": other, "replicas": 1}]),
            at(f"{first}.gpu", "H200"),
            before=only(role),
        ),
        Rule(
            f"{pools}[].podsPerReplica",
            "podsPerReplica and gpusPerPod of a pool cannot change: add a pool under another name, "
            "and remove this one",
            at(f"{first}.replicas", 2),
            at(f"{first}.podsPerReplica", 1),
            before=only(role),
        ),
        (only(role), both(only(role), at(f"{first}.gpusPerPod", 4))),
        *amount_rules(role),
    ]


def amount_rules(role: str) -> list[Case]:
    """Rules of the resources of every role, routers included."""
    own = f"spec.roles.{role}"

    def amounts(kind: str, value: object) -> Change:
        return both(only(role), at(f"{own}.resources.{kind}", {"memory": value}))

    return [
        (amounts("requests", "1.5"), amounts("requests", "lots")),
        (amounts("limits", 0), amounts("limits", -1)),
        (
            both(only(role), at(f"{own}.sharedMemory", "64Gi")),
            both(only(role), at(f"{own}.sharedMemory", "64 GiB")),
        ),
        (
            both(only(role), at(f"{own}.startupTimeoutSeconds", 3600)),
            both(only(role), at(f"{own}.startupTimeoutSeconds", 3601)),
        ),
        (
            both(amounts("requests", "1024Mi"), at(f"{own}.resources.limits", {"memory": "1Gi"})),
            both(amounts("requests", "1025Mi"), at(f"{own}.resources.limits", {"memory": "1Gi"})),
        ),
    ]


def claim_rules(role: str) -> list[Case]:
    """Rules of the claims of a role with an engine."""
    claims = f"spec.roles.{role}.resourceClaims"

    def claim(**fields: str) -> Change:
        return both(only(role), at(claims, [{"name": "nic", **fields}]))

    one, other = {"resourceClaimName": "a"}, {"resourceClaimTemplateName": "a"}
    return [
        (claim(**one), claim(name="1-a", **one)),
        (claim(**other), claim(**one, **other)),
        *((claim(**{field: "a.b"}), claim(**{field: "A"})) for field in (*one, *other)),
    ]


def engineless_rules(role: str) -> list[Case | Rule]:
    """Rules of routers, or of pickers."""
    own, there = f"spec.roles.{role}", only(role)
    long = both(there, at(own, {"pools": [{"name": "r" * 20, "replicas": 1}]}))
    return [
        *pool_rules(role),
        (there, both(there, at(f"{own}.engine", {"blockSize": 16}))),
        (
            there,
            both(there, at(f"{own}.resourceClaims", [{"name": "a", "resourceClaimName": "a"}])),
        ),
        (there, both(there, at(own, {"pools": [BIG]}))),
        (there, both(there, at(f"{own}.pools.0.podsPerReplica", 2))),
        (both(long, at("metadata.name", "c" * 15)), both(long, at("metadata.name", "c" * 16))),
    ]


def role_rules(role: str) -> list[Case | Rule]:
    own, room = f"spec.roles.{role}", {"prefill": 34, "decode": 35, "mixed": 36}[role]
    other = {"prefill": "decode", "decode": "prefill"}.get(role)
    short = at(f"spec.roles.{other}.pools.0.name", "c") if other else SAME

    on_cpu = at(f"spec.roles.{other}.engine", {"device": "cpu"}) if other else SAME
    in_pods = both(at("spec.engine.dataParallelSize", 2), at(f"{own}.pools.0.podsPerReplica", 2))

    def named(characters: int) -> Change:
        return both(
            only(role),
            short,
            at(f"{own}.pools.0.name", "p" * 20),
            at("metadata.name", "c" * (characters - 20)),
        )

    return [
        *pool_rules(role),
        Rule(
            f"{own}.pools[].gpusPerReplica",
            "gpusPerReplica of a pool cannot change: add a pool under another name, and remove "
            "this one",
            at(f"{own}.pools.0.replicas", 2),
            at(f"{own}.pools.0.gpusPerReplica", 4),
            before=both(
                only(role), at(f"{own}.pools.0.gpu", "H100"), at(f"{own}.pools.0.gpusPerReplica", 2)
            ),
        ),
        (
            both(only(role), at("spec.accelerators", {"A1": {}}), at(f"{own}.pools.0.gpu", "A1")),
            both(only(role), at("spec.accelerators", {"A1": {}}), at(f"{own}.pools.0.gpu", "A2")),
        ),
        (named(room), named(room + 1)),
        (both(named(room - 7), in_pods), both(named(room - 6), in_pods)),
        (
            both(
                only(role),
                at("spec.engine.maxSequences", 512),
                at(f"{own}.engine.maxBatchedTokens", 512),
                _other_room(other),
            ),
            both(
                only(role),
                at("spec.engine.maxBatchedTokens", 512),
                at(f"{own}.engine.maxSequences", 513),
            ),
        ),
        (
            both(
                only(role), at(f"{own}.pools.0.gpu", "B200"), at(f"{own}.engine.maxSequences", 8192)
            ),
            both(
                only(role), at(f"{own}.pools.0.gpu", "B200"), at(f"{own}.engine.maxSequences", 8193)
            ),
        ),
        *scheduling_cases(role, only(role)),
        *role_cases(role, only(role)),
        (
            both(only(role), at(f"{own}.engine", {"device": "cuda"}), at(f"{own}.pools", [BIG])),
            both(only(role), at("spec.engine", {"device": "cuda"}), on_cpu),
        ),
        (
            both(
                only(role),
                at("spec.engine", {"batchInvariant": True, "device": "cpu"}),
                at(f"{own}.pools", [BIG]),
            ),
            both(
                only(role), at("spec.engine", {"batchInvariant": True}), at(f"{own}.pools", [BIG])
            ),
        ),
        (
            both(only(role), at(f"{own}.engine.kvCacheMemory", "0.5Gi")),
            both(only(role), at(f"{own}.engine.kvCacheMemory", "0Gi")),
        ),
    ]


def _other_room(other: str | None) -> Change:
    return at(f"spec.roles.{other}.engine.maxBatchedTokens", 512) if other else SAME


def name_rule(field: str, *sections: Change) -> Case:
    """The rule for the name of an object of the user's at a field, or at the entries of one."""
    path, is_list = field.removesuffix("[]"), field.endswith("[]")
    right, wrong = ("models.of.all", "Models")
    return (
        both(*sections, at(path, [right] if is_list else right)),
        both(*sections, at(path, [wrong] if is_list else wrong)),
    )


MODEL_RULES: list[Case] = [
    name_rule("spec.model.pvc.claimName"),
    name_rule("spec.model.huggingFace.tokenSecret", at("spec.model", HUB)),
    name_rule("spec.image.pullSecrets[]"),
]

ETCD = "spec.discovery.etcd"
OWN, STORED = {"endpoints": ["etcd:2379"]}, {"storage": {"size": "1Gi", "className": "fast"}}
ETCD_RULES: list[Case | Rule] = [
    (at(ETCD, {**STORED, "replicas": 3}), at(ETCD, {"replicas": 3})),
    name_rule(f"{ETCD}.tlsSecret", at(ETCD, OWN)),
    Rule(
        "spec.discovery",
        EXCHANGED,
        at(ETCD, {"endpoints": ["other:2379"]}),
        at(ETCD, {}),
        before=at(ETCD, OWN),
    ),
    Rule("spec.discovery", EXCHANGED, at(ETCD, {"image": "etcd:3"}), at(ETCD, OWN), before=SAME),
    Rule(
        "spec.discovery",
        "discovery.etcd.replicas cannot change: make a new PDCluster",
        at(ETCD, {**STORED, "replicas": 1}),
        at(ETCD, {**STORED, "replicas": 3}),
        before=at(ETCD, STORED),
    ),
    *(
        Rule(
            "spec.discovery",
            "discovery.etcd.storage cannot change: make a new PDCluster",
            right,
            wrong,
            before=before,
        )
        for right, wrong, before in (
            (
                at(f"{ETCD}.storage.retain", False),
                at(f"{ETCD}.storage.retain", True),
                at(ETCD, STORED),
            ),
            (at("spec.service.port", 80), at(f"{ETCD}.storage.size", "2Gi"), at(ETCD, STORED)),
            (at(f"{ETCD}.image", "etcd:3"), without(f"{ETCD}.storage.className"), at(ETCD, STORED)),
            (at(f"{ETCD}.storage.className", "fast"), without(f"{ETCD}.storage"), at(ETCD, STORED)),
            (at(ETCD, {}), at(ETCD, STORED), SAME),
        )
    ),
]

AUTOSCALE = "spec.autoscale"


def lines(role: str, signal: str, right: float, wrong: float) -> Case:
    """The rule for a scale-down threshold.

    right: the least that its scale-up threshold may be lowered to; wrong: one step further
    """
    up = f"{AUTOSCALE}.{role}.{signal}Up"
    return at(up, right), at(up, wrong)


def night(**changes: object) -> Change:
    return at(f"{AUTOSCALE}.schedules", [NIGHT, {**NIGHT, "name": "late", **changes}])


AUTOSCALE_RULES: list[Case] = [
    lines("prefill", "queue", 3, 2),
    lines("prefill", "utilization", 0.41, 0.4),
    lines("decode", "queue", 5, 4),
    lines("decode", "kvUsage", 0.31, 0.3),
    *(
        (at(f"spec.routing.{part}", {}), both(only("mixed"), at(f"spec.routing.{part}", {})))
        for part in ("offload", "prefillScore", "prefillQueue", "credits")
    ),
    (night(name="night-2"), night(name="Night")),
    *((night(**{field: "23:59"}), night(**{field: "24:00"})) for field in ("start", "end")),
]


def pools_in_all(role: str, number: int) -> Change:
    """So many pools, those of one role and what the others have."""
    rest = number - {"mixed": 0, "router": 2, "picker": 2}.get(role, 1)
    return at(
        f"spec.roles.{role}.pools", [{"name": f"p{each}", "replicas": 0} for each in range(rest)]
    )


def many(role: str, replicas: int) -> Change:
    """So many in all, five pools of one role and what the other has."""
    rest = replicas - 4 * 1023 - {"mixed": 0, "router": 2, "picker": 2}.get(role, 1)
    pools = [{"name": f"p{number}", "replicas": 1023} for number in range(4)]
    return at(f"spec.roles.{role}.pools", [*pools, {"name": "p4", "replicas": rest}])


SPECULATING = {
    "spec.engine": at("spec.roles.prefill.engine.speculation", {"method": "Off"}),
    "spec.roles.prefill.engine": SAME,
    "spec.roles.decode.engine": SAME,
    "spec.roles.mixed.engine": only("mixed"),
}
"""Places of engine.speculation, and what else an object needs that has it there."""


TIERED = SPECULATING | {"spec.engine": SAME}
"""Places of engine.kvTiers, likewise."""


def speculation_rules(place: str) -> list[Case]:
    """Rules of engine.speculation, in one place."""
    field, base = f"{place}.speculation", SPECULATING[place]
    is_prefill = place == "spec.roles.prefill.engine"
    drafts = {"method": "Off"} if is_prefill else {"method": "draft", "draftModel": "/small"}
    method = {"method": "Off"} if is_prefill else {}
    return [
        (both(base, at(field, drafts)), both(base, at(field, {"draftModel": "/small"}))),
        (
            both(base, at(field, {**method, "promptLookupMin": 5})),
            both(base, at(field, {**method, "promptLookupMin": 6})),
        ),
    ]


RULES: list[Case | Rule] = [
    *(rule for role in ROLES for rule in (*role_rules(role), *claim_rules(role))),
    *(rule for role in ENGINELESS for rule in engineless_rules(role)),
    (
        both(only("router"), at("spec.routing", {"relaying": {"enabled": True}})),
        at("spec.routing", {"relaying": {"enabled": True}}),
    ),
    (only("picker"), OWN_PICKER),
    (both(only("router"), rolling()), both(only("picker"), rolling())),
    (both(only("picker"), BLUE_GREEN), both(SLEEPS, only("router"), rolling())),
    (
        both(SLEEPS, only("router"), at("spec.rollout", {"gracePeriodSeconds": 60})),
        both(SLEEPS, only("router"), at("spec.rollout", {"maxSurge": 2})),
    ),
    (
        both(only("picker"), at("spec.rollout", {"strategy": None, "maxSurge": None})),
        both(only("picker"), at("spec.rollout", {"strategy": None, "maxSurge": 2})),
    ),
    (
        at("spec.rollout", {"strategy": None, "onFailure": "Pause"}),
        at("spec.rollout", {"strategy": None, "maxSurge": 0}),
    ),
    (at("spec.rollout", {"maxSurge": 2}), not_rolling(maxSurge=2)),
    (rolling(maxUnavailable="100%"), not_rolling(maxUnavailable="25%")),
    (rolling(maxSurge=0, maxUnavailable=1), rolling(maxSurge="0%")),
    (rolling(maxSurge="100%"), rolling(maxSurge="500%")),
    (rolling(maxUnavailable="100%"), rolling(maxUnavailable=-1)),
    (rolling(onFailure="Pause"), not_rolling(onFailure="Pause")),
    (rolling(onFailure="Rollback", bakeSeconds=0), rolling(bakeSeconds=60)),
    (rolling(onFailure="Pause", whenUnknown="Continue"), rolling(whenUnknown="Continue")),
    (
        both(ATTAINED, rolling(onFailure="Pause", minRequests=9)),
        both(ATTAINED, rolling(minRequests=9)),
    ),
    (
        both(ATTAINED, rolling(onFailure="Pause", minRequests=9)),
        rolling(onFailure="Pause", minRequests=9),
    ),
    (
        both(
            at("spec.autoscale", {"mode": "Advise", "decode": {"tpotSeconds": 1.0}}),
            rolling(onFailure="Pause", minRequests=9),
        ),
        both(
            at("spec.autoscale", {"mode": "Off", "objective": {"itl": {"seconds": 1.0}}}),
            rolling(onFailure="Pause", minRequests=9),
        ),
    ),
    *MODEL_RULES,
    *ETCD_RULES,
    *AUTOSCALE_RULES,
    *OBJECT_CASES,
    *STOCK_CASES,
    *FLEXIBLE_CASES,
    *(rule for place in SPECULATING for rule in speculation_rules(place)),
    *(case for place, base in TIERED.items() for case in list_cases(place, base)),
    *(
        case
        for role in ("prefill", "decode", "mixed")
        for case in tier_cases(role, TIERED[f"spec.roles.{role}.engine"])
    ),
    *(
        Rule(
            "spec.accelerators{}",
            "the definition of an accelerator cannot change: add a type under another name, and "
            "pools of it",
            right,
            wrong,
            before=at(
                "spec.accelerators",
                {
                    "X1": {"resource": "x.io/gpu", "nodeLabels": {"a": "b"}},
                    "X2": {"resource": None},
                },
            ),
        )
        for right, wrong in (
            (
                at("spec.accelerators.X3", {"resource": "x.io/three"}),
                at("spec.accelerators.X1.resource", "x.io/other"),
            ),
            (without("spec.accelerators.X1"), at("spec.accelerators.X1.nodeLabels", {"a": "c"})),
            (
                at("spec.accelerators.X2", {"nodeLabels": {}}),
                at("spec.accelerators.X2", {"resource": "x.io/gpu"}),
            ),
            (without("spec.accelerators"), without("spec.accelerators.X1.nodeLabels")),
            (
                at("spec.accelerators.X1.memoryBytes", 192_000_000_000),
                both(
                    at("spec.accelerators.X1.memoryBytes", 192_000_000_000),
                    at("spec.accelerators.X1.resource", "x.io/other"),
                ),
            ),
        )
    ),
    name_rule("spec.service.apiKeySecret"),
    name_rule("spec.service.endpointPicker.name"),
    *(
        (
            both(
                only(role), at(f"spec.roles.{role}.engine", {"numBlocks": 4, "dataParallelSize": 4})
            ),
            both(
                only(role), at(f"spec.roles.{role}.engine", {"numBlocks": 4, "dataParallelSize": 5})
            ),
        )
        for role in ("prefill", "decode", "mixed")
    ),
]

# What the rules that `wrong_objects` breaks let through
ACCEPTED: list[Change] = [
    at("metadata.name", "a-1"),
    both(at("spec.engine.blockSize", 32), at("spec.roles.decode.engine.blockSize", 32)),
    both(
        at("spec.engine.kvCacheDtype", "int8"), at("spec.roles.decode.engine.kvCacheDtype", "int8")
    ),
    both(
        at("spec.engine.quantization", "int8"), at("spec.roles.decode.engine.quantization", "int8")
    ),
    both(
        at("spec.engine.allowMixedPrecision", True),
        at("spec.roles.prefill.engine.quantization", "fp8_e4m3"),
    ),
    both(
        at("spec.engine.batchInvariant", True), at("spec.roles.decode.engine.batchInvariant", True)
    ),
    both(
        at("spec.engine.speculation", {}),
        at("spec.roles.prefill.engine.speculation", {"method": "Off"}),
    ),
    both(
        at("spec.engine.prefillDelayer", {}),
        at("spec.roles.decode.engine.prefillDelayer", {"enabled": False}),
    ),
    both(
        at("spec.engine.tensorParallelSize", 4),
        at("spec.roles.decode.engine.tensorParallelSize", 2),
    ),
    at("spec.engine", {"tensorParallelSize": 4, "pipelineParallelSize": 2}),
    at("spec.engine", {"tensorParallelSize": 4, "dataParallelSize": 4}),
    vllm(tensorParallelSize=2, dataParallelSize=4, numBlocks=4),
    *(
        both(
            vllm(tensorParallelSize=4, dataParallelSize=2),
            at("spec.roles.decode.pools.0.podsPerReplica", pods),
        )
        for pods in (2, 4)
    ),
    both(
        at("spec.roles.decode.pools.0.podsPerReplica", 2),
        at("spec.roles.decode.engine.dataParallelSize", 2),
    ),
    both(
        vllm(),
        at("spec.engine.tensorParallelSize", 16),
        *(
            both(
                at(f"spec.roles.{role}.pools.0.gpu", "GB200"),
                at(f"spec.roles.{role}.pools.0.gpusPerPod", 4),
                at(f"spec.roles.{role}.pools.0.gpusPerReplica", 16),
            )
            for role in ("prefill", "decode")
        ),
    ),
    both(
        at("spec.roles.decode.pools.0.gpu", "H100"),
        at("spec.roles.decode.pools.0.gpusPerReplica", 8),
    ),
    only("mixed"),
    both(only("mixed"), at("spec.placement", {"domainLabel": "rack", "minTransferGBps": None})),
    both(only("mixed"), pools_in_all("mixed", 16)),
    at("spec.engine.kvCacheMemory", "1k"),
    both(
        at("spec.model.runtimeAdapters", {"path": "/lora", "memory": "100Gi"}),
        *(at(f"spec.roles.{role}.pools.0.gpu", "H100") for role in ("prefill", "decode")),
        at("spec.roles.decode.engine.kvTiers", [{"type": "host", "size": "32Gi"}]),
        at("spec.roles.decode.resources.limits", {"memory": "33Gi"}),
    ),
    at("spec.service.cors", {"allowedOrigins": ["https://a.example"], "allowCredentials": True}),
    at(
        "spec.service.cors",
        {"allowedOrigins": ["*", "http://localhost:3000", "chrome-extension://abc"]},
    ),
    at("spec.service.cors", {"allowedHeaders": ["x-a'b", "authorization"]}),
    both(
        at("spec.service.models", [{"name": "a", "cluster": "b"}]),
        at("spec.qos.degradation.smallerModel", {"name": "a"}),
        at("spec.routing.racing", {"models": True}),
    ),
    both(
        at("spec.service.models", [{"name": "a", "cluster": "b", "port": 80}]),
        at("spec.qos.degradation.smallerModel", {"name": "c", "url": "http://c"}),
    ),
    at("spec.model.chatTemplate", "{% for m in messages %}{{ m.content }}{% endfor %}"),
    at("spec.model", HUB),
    at("spec.model", VOLUME),
    at("spec.model", {**HUB, "path": None}),
    at("spec.model", {**HUB, "nodeCache": "/cache"}),
    at("spec.model", {"name": "tiny", "huggingFace": {"repo": "gpt2"}}),
    at(ETCD, {**OWN, "tlsSecret": "tls"}),
    at(ETCD, STORED),
    at(ETCD, {"endpoints": ["a:1", "a:9999", "a:10000", "a:60000", "b.c:65535"]}),
    at(ETCD, {"endpoints": ["a:65535", "[fd00::1]:2379"]}),
    at(ETCD, {"endpoints": ["169.253.169.254:80", "[fec0::1]:80"]}),
    at(f"{ETCD}.storage.size", 1 << 30),
    at(f"{AUTOSCALE}.ratio", {"min": 0.5, "max": 0.5}),
    *(at(f"{AUTOSCALE}.{field}", {}) for field in ("prefill", "ratio")),
    at("spec.routing.offload.sloFeedback", {"minThreshold": 8, "maxThreshold": 8}),
    *(
        at("spec.routing.prefillQueue", right)
        for right in (
            {"minWindowMilliseconds": 10},
            {"minPrompts": 32},
            {"lengthBuckets": [1, 2]},
            {"lengthBuckets": []},
            {"latencyClasses": [{"priority": each, "windowMilliseconds": 1} for each in (0, 1)]},
        )
    ),
    at("spec.placement", {"minTransferGBps": 1.5}),
    at("spec.placement", {"domainLabel": "rack"}),
    *(
        both(
            at("spec.roles.decode.engine.dataParallelSize", 2),
            at("spec.roles.decode.pools.0.podsPerReplica", 2),
            at("spec.placement", right),
        )
        for right in (
            {"gang": "PodGroup"},
            {"gang": "Volcano", "queue": "gpus"},
            {"domainLabel": "rack", "mode": "Exclusive"},
        )
    ),
    *(
        both(right, at(f"{AUTOSCALE}.mode", "On"))
        for right in (
            CEILINGS,
            at(f"{AUTOSCALE}.budget", {"total": 4}),
            both(only("mixed"), at("spec.roles.mixed.pools.0.maxReplicas", 4)),
        )
    ),
    both(SLEEPS, only("router")),
    both(SLEEPS, at("spec.roles.decode.pools.0.minReplicas", 1)),
    both(SLEEPS, at(f"{AUTOSCALE}.mode", "Advise")),
    night(role="prefill"),
    *(
        both(at("spec.accelerators", {"A1": {}}), at(f"{AUTOSCALE}.{field}", {"A1": 1, "H100": 2}))
        for field in ("budget.perGpu", "cost")
    ),
    night(minReplicas=2, maxReplicas=2),
    night(maxReplicas=None, minReplicas=0),
    night(name="night-2"),
    *(both(only(role), many(role, 4096)) for role in (*ROLES, *ENGINELESS)),
    *(both(only(role), pools_in_all(role, 16)) for role in ("prefill", "decode", *ENGINELESS)),
]
