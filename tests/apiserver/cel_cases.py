"""One object that a CEL rule lets through and one that it refuses, for each rule of the PDCluster
CRD.

A rule is known by where it speaks and what it says, so that a rule without a
case, or a case without a rule, fails a test.
"""

from dataclasses import dataclass

from tests.apiserver.cel_scheduling import OBJECT_CASES, scheduling_cases
from tests.apiserver.cel_stock_engines import STOCK_CASES, role_cases
from tests.schema.object_cases import (
    CEILINGS,
    CPU,
    HUB,
    NIGHT,
    VOLUME,
    Change,
    at,
    both,
    vllm,
    without,
)

ROLES = ("prefill", "decode", "mixed")
NAME = (
    "not a name that Kubernetes takes: use lower-case letters, digits, '-' and '.', starting and "
    "ending with a letter or digit"
)
LABEL = (
    "use at most 63 lower-case letters, digits and '-', starting with a letter and ending with a "
    "letter or digit"
)
MEMORY = (
    "not an amount of memory: write bytes, or a number with Ki, Mi, Gi or Ti such as 512Mi; more "
    "than 0"
)
AMOUNT = "not an amount: write a whole number, or a quantity in quotes such as 500m, 1.5 or 16Gi"
TYPES = (
    "one of A10, A100-40GB, A100-80GB, B200, B300, GAUDI3, GB200, GB300, H100, H20, H200, L4, "
    "L40S, MI300X, MI355X, RTX-PRO-6000, T4 and cpu, or be defined in spec.accelerators"
)
GPU = f"gpu must be {TYPES}"
CUDA = (
    "is cuda, which needs an accelerator as gpu of each pool: give the pool another gpu, or leave "
    "engine.device out"
)
INVARIANT = (
    "is for CPUs so far, and gpu of a pool is not cpu: leave it out, or set engine.device: cpu"
)
BIG = {"name": "big", "gpu": "B200", "replicas": 1}
ROOM = (
    "must be at least maxSequences, since a step computes a token of each sequence: raise "
    "maxBatchedTokens or lower maxSequences"
)
EXCHANGED = (
    "an etcd of your own (discovery.etcd.endpoints) and one that is run for the cluster cannot be "
    "exchanged for each other:"
    " make a new PDCluster"
)
SAME: Change = lambda content: None  # noqa: E731 - a change like the others


@dataclass(frozen=True)
class Rule:
    """A rule and its two cases.

    field:   where it speaks, with [] for the entry of a list and {} for that of a map
    before:  for a rule about changes, the object as it was; `right` and `wrong` then change that
             one
    """

    field: str
    message: str
    right: Change
    wrong: Change
    before: Change | None = None


ENGINELESS = ("router", "picker")
OWN_PICKER = at("spec.service.endpointPicker", {})


def only(role: str) -> Change:
    """An object that has the role, and the others that it needs."""
    if role == "router":
        return at("spec.roles.router", {"pools": [CPU]})
    if role == "picker":
        return both(OWN_PICKER, at("spec.roles.picker", {"pools": [CPU]}))
    return at("spec.roles", {"mixed": {"pools": [CPU]}}) if role == "mixed" else SAME


def pool_rules(role: str) -> list[Rule]:
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
        Rule(
            f"{pools}[].minReplicas",
            "minReplicas must be at most maxReplicas: lower minReplicas or raise maxReplicas",
            bounds(2, 2, 2),
            bounds(2, 3, 2),
        ),
        Rule(
            f"{pools}[].replicas",
            "replicas must be at least minReplicas: raise replicas or lower minReplicas",
            bounds(1, 1, 3),
            bounds(0, 1, 3),
        ),
        Rule(
            f"{pools}[].replicas",
            "replicas must be at most maxReplicas: lower replicas or raise maxReplicas",
            bounds(3, 1, 3),
            bounds(4, 1, 3),
        ),
        Rule(
            f"{pools}[].name",
            LABEL,
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
        Rule(
            f"{pools}[].gpusPerPod",
            "gpusPerPod means nothing on a pool with gpu: cpu: leave it out, or give the pool a "
            "gpu",
            only(role),
            both(only(role), at(f"{first}.gpusPerPod", 4)),
        ),
        *amount_rules(role),
    ]


def amount_rules(role: str) -> list[Rule]:
    """Rules of the resources of every role, routers included."""
    own = f"spec.roles.{role}"

    def amounts(kind: str, value: object) -> Change:
        return both(only(role), at(f"{own}.resources.{kind}", {"memory": value}))

    return [
        Rule(
            f"{own}.resources.requests{{}}",
            AMOUNT,
            amounts("requests", "1.5"),
            amounts("requests", "lots"),
        ),
        Rule(f"{own}.resources.limits{{}}", AMOUNT, amounts("limits", 0), amounts("limits", -1)),
        Rule(
            f"{own}.sharedMemory",
            MEMORY,
            both(only(role), at(f"{own}.sharedMemory", "64Gi")),
            both(only(role), at(f"{own}.sharedMemory", "64 GiB")),
        ),
        Rule(
            f"{own}.startupTimeoutSeconds",
            f"roles.{role}.startupTimeoutSeconds must be at most rollout.progressDeadlineSeconds, "
            "when a roll out is given up: raise rollout.progressDeadlineSeconds too",
            both(only(role), at(f"{own}.startupTimeoutSeconds", 3600)),
            both(only(role), at(f"{own}.startupTimeoutSeconds", 3601)),
        ),
        Rule(
            f"{own}.resources.requests",
            "each request must be at most the limit of the same resource: lower the request or "
            "raise the limit",
            both(amounts("requests", "1024Mi"), at(f"{own}.resources.limits", {"memory": "1Gi"})),
            both(amounts("requests", "1025Mi"), at(f"{own}.resources.limits", {"memory": "1Gi"})),
        ),
    ]


def claim_rules(role: str) -> list[Rule]:
    """Rules of the claims of a role with an engine."""
    claims = f"spec.roles.{role}.resourceClaims"

    def claim(**fields: str) -> Change:
        return both(only(role), at(claims, [{"name": "nic", **fields}]))

    one, other = {"resourceClaimName": "a"}, {"resourceClaimTemplateName": "a"}
    return [
        Rule(f"{claims}[].name", LABEL, claim(**one), claim(name="1-a", **one)),
        Rule(
            f"{claims}[]",
            "needs one source: give either resourceClaimName or resourceClaimTemplateName",
            claim(**other),
            claim(**one, **other),
        ),
        *(
            Rule(f"{claims}[].{field}", NAME, claim(**{field: "a.b"}), claim(**{field: "A"}))
            for field in (*one, *other)
        ),
    ]


def engineless_rules(role: str) -> list[Rule]:
    """Rules of routers, or of pickers."""
    own, there = f"spec.roles.{role}", only(role)
    name = (
        f"metadata.name and the name of each {role} pool may have at most 35 characters together: "
        "shorten one of them"
    )
    long = both(there, at(own, {"pools": [{"name": "r" * 20, "replicas": 1}]}))
    return [
        *pool_rules(role),
        Rule(
            f"{own}.engine",
            f"{role}.engine is not for {role}s, which have no engine: remove it",
            there,
            both(there, at(f"{own}.engine", {"blockSize": 16})),
        ),
        Rule(
            f"{own}.resourceClaims",
            f"{role}.resourceClaims is not for {role}s, which compute nothing: remove it",
            there,
            both(there, at(f"{own}.resourceClaims", [{"name": "a", "resourceClaimName": "a"}])),
        ),
        Rule(
            f"{own}.pools",
            f"{role}.pools must have gpu: cpu, since a {role} computes nothing: leave gpu out",
            there,
            both(there, at(own, {"pools": [BIG]})),
        ),
        Rule(
            f"{own}.pools",
            f"{role}.pools must have podsPerReplica 1, since a {role} is one process: leave "
            "podsPerReplica out",
            there,
            both(there, at(f"{own}.pools.0.podsPerReplica", 2)),
        ),
        Rule(
            "metadata.name",
            name,
            both(long, at("metadata.name", "c" * 15)),
            both(long, at("metadata.name", "c" * 16)),
        ),
    ]


def role_rules(role: str) -> list[Rule]:
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
        Rule(
            f"{own}.pools",
            GPU,
            both(only(role), at("spec.accelerators", {"A1": {}}), at(f"{own}.pools.0.gpu", "A1")),
            both(only(role), at("spec.accelerators", {"A1": {}}), at(f"{own}.pools.0.gpu", "A2")),
        ),
        Rule(
            "metadata.name",
            f"metadata.name and the name of each {role} pool may have at most {room} characters "
            "together: shorten one of them",
            named(room),
            named(room + 1),
        ),
        Rule(
            "metadata.name",
            f"metadata.name and the name of each {role} pool whose workers are of several pods may "
            f"have at most {room - 7} characters together: shorten one of them",
            both(named(room - 7), in_pods),
            both(named(room - 6), in_pods),
        ),
        Rule(
            f"{own}.engine.maxBatchedTokens",
            f"roles.{role}.engine.maxBatchedTokens {ROOM}",
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
        Rule(
            f"{own}.engine.maxBatchedTokens",
            f"roles.{role}.engine.maxBatchedTokens {ROOM}",
            both(
                only(role), at(f"{own}.pools.0.gpu", "B200"), at(f"{own}.engine.maxSequences", 8192)
            ),
            both(
                only(role), at(f"{own}.pools.0.gpu", "B200"), at(f"{own}.engine.maxSequences", 8193)
            ),
        ),
        *(Rule(*case) for case in scheduling_cases(role, only(role))),
        *(Rule(*case) for case in role_cases(role, only(role))),
        Rule(
            f"{own}.engine.device",
            f"roles.{role}.engine.device {CUDA}",
            both(only(role), at(f"{own}.engine", {"device": "cuda"}), at(f"{own}.pools", [BIG])),
            both(only(role), at("spec.engine", {"device": "cuda"}), on_cpu),
        ),
        Rule(
            f"{own}.engine.batchInvariant",
            f"roles.{role}.engine.batchInvariant {INVARIANT}",
            both(
                only(role),
                at("spec.engine", {"batchInvariant": True, "device": "cpu"}),
                at(f"{own}.pools", [BIG]),
            ),
            both(
                only(role), at("spec.engine", {"batchInvariant": True}), at(f"{own}.pools", [BIG])
            ),
        ),
        Rule(
            f"{own}.engine.kvCacheMemory",
            MEMORY,
            both(only(role), at(f"{own}.engine.kvCacheMemory", "0.5Gi")),
            both(only(role), at(f"{own}.engine.kvCacheMemory", "0Gi")),
        ),
    ]


def _other_room(other: str | None) -> Change:
    return at(f"spec.roles.{other}.engine.maxBatchedTokens", 512) if other else SAME


def name_rule(field: str, *sections: Change) -> Rule:
    """The rule for the name of an object of the user's at a field, or at the entries of one."""
    path, is_list = field.removesuffix("[]"), field.endswith("[]")
    right, wrong = ("models.of.all", "Models")
    return Rule(
        field,
        NAME,
        both(*sections, at(path, [right] if is_list else right)),
        both(*sections, at(path, [wrong] if is_list else wrong)),
    )


MODEL_RULES: list[Rule] = [
    name_rule("spec.model.pvc.claimName"),
    name_rule("spec.model.huggingFace.tokenSecret", at("spec.model", HUB)),
    name_rule("spec.image.pullSecrets[]"),
]

ETCD = "spec.discovery.etcd"
OWN, STORED = {"endpoints": ["etcd:2379"]}, {"storage": {"size": "1Gi", "className": "fast"}}
ETCD_RULES: list[Rule] = [
    Rule(
        f"{ETCD}.storage",
        "storage is needed by 3 members: one that lost its data could not come back: give "
        "storage, or replicas: 1",
        at(ETCD, {**STORED, "replicas": 3}),
        at(ETCD, {"replicas": 3}),
    ),
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
EACH_TYPE = f"each type must be {TYPES}"


def lines(role: str, signal: str, right: float, wrong: float) -> Rule:
    """The rule for a scale-down threshold.

    right: the least that its scale-up threshold may be lowered to; wrong: one step further
    """
    message = (
        f"{signal}Down must be less than {signal}Up: lower it, or raise the scale-up threshold"
    )
    up = f"{AUTOSCALE}.{role}.{signal}Up"
    return Rule(f"{AUTOSCALE}.{role}.{signal}Down", message, at(up, right), at(up, wrong))


def night(**changes: object) -> Change:
    return at(f"{AUTOSCALE}.schedules", [NIGHT, {**NIGHT, "name": "late", **changes}])


AUTOSCALE_RULES: list[Rule] = [
    lines("prefill", "queue", 3, 2),
    lines("prefill", "utilization", 0.41, 0.4),
    lines("decode", "queue", 5, 4),
    lines("decode", "kvUsage", 0.31, 0.3),
    *(
        Rule(
            f"spec.routing.{part}",
            f"routing.{part} means nothing beside mixed workers, which prefill what they decode: "
            "remove it",
            at(f"spec.routing.{part}", {}),
            both(only("mixed"), at(f"spec.routing.{part}", {})),
        )
        for part in ("offload", "prefillScore", "prefillQueue", "credits")
    ),
    Rule(f"{AUTOSCALE}.schedules[].name", LABEL, night(name="night-2"), night(name="Night")),
    *(
        Rule(
            f"{AUTOSCALE}.schedules[].{field}",
            "not a time of day: write HH:MM, as in 08:30",
            night(**{field: "23:59"}),
            night(**{field: "24:00"}),
        )
        for field in ("start", "end")
    ),
]

WORKERS = (
    "replicas of all pools must be at most 4096 together: lower some, or make another PDCluster"
)

POOLS = "pools of all roles must be at most 16 together: join some, or make another PDCluster"


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


def speculation_rules(place: str) -> list[Rule]:
    """Rules of engine.speculation, in one place."""
    field, base = f"{place}.speculation", SPECULATING[place]
    is_prefill = place == "spec.roles.prefill.engine"
    drafts = {"method": "Off"} if is_prefill else {"method": "draft", "draftModel": "/small"}
    method = {"method": "Off"} if is_prefill else {}
    return [
        Rule(
            f"{field}.draftModel",
            "draftModel is for method: draft, which needs it: give the folder of a smaller model "
            "with that method, or leave it out",
            both(base, at(field, drafts)),
            both(base, at(field, {"draftModel": "/small"})),
        ),
        Rule(
            f"{field}.promptLookupMin",
            "promptLookupMin must be at most promptLookupMax: lower the one or raise the other",
            both(base, at(field, {**method, "promptLookupMin": 5})),
            both(base, at(field, {**method, "promptLookupMin": 6})),
        ),
    ]


RULES: list[Rule] = [
    *(rule for role in ROLES for rule in (*role_rules(role), *claim_rules(role))),
    *(rule for role in ENGINELESS for rule in engineless_rules(role)),
    Rule(
        "spec.routing.relaying",
        "routing.relaying is for routers, and there are none: give roles.router, or leave "
        "routing.relaying out",
        both(only("router"), at("spec.routing", {"relaying": {"enabled": True}})),
        at("spec.routing", {"relaying": {"enabled": True}}),
    ),
    Rule(
        "spec.service.endpointPicker",
        "service.endpointPicker needs roles.picker where it has no name, and roles.picker needs it "
        "so: give both endpointPicker: {} and roles.picker, or the name of a picker of yours",
        only("picker"),
        OWN_PICKER,
    ),
    *MODEL_RULES,
    *ETCD_RULES,
    *AUTOSCALE_RULES,
    *(Rule(*case) for case in (*OBJECT_CASES, *STOCK_CASES)),
    *(rule for place in SPECULATING for rule in speculation_rules(place)),
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
        Rule(
            f"spec.roles.{role}.engine.numBlocks",
            f"roles.{role}.engine.numBlocks must be at least dataParallelSize, whose engines share "
            "them: raise numBlocks or lower dataParallelSize",
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
        at("spec.engine.batchInvariant", True),
        at("spec.roles.decode.engine.batchInvariant", True),
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
    at("spec.service.cors", {"allowedOrigins": ["https://a.example"], "allowCredentials": True}),
    at(
        "spec.service.cors",
        {"allowedOrigins": ["*", "http://localhost:3000", "chrome-extension://abc"]},
    ),
    at("spec.service.cors", {"allowedHeaders": ["x-a'b", "authorization"]}),
    at("spec.model.chatTemplate", "{% for m in messages %}{{ m.content }}{% endfor %}"),
    at("spec.model", HUB),
    at("spec.model", VOLUME),
    at("spec.model", VOLUME),
    at("spec.model", {**HUB, "path": None}),
    at("spec.model", {**HUB, "nodeCache": "/cache"}),
    at("spec.model", {**HUB, "nodeCache": "/c"}),
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
        for field, message, right, wrong in (
            (
                "minWindowMilliseconds",
                "minWindowMilliseconds must be at most maxWindowMilliseconds: lower "
                "minWindowMilliseconds or raise maxWindowMilliseconds",
                {"minWindowMilliseconds": 10},
                {"minWindowMilliseconds": 11},
            ),
            (
                "minPrompts",
                "minPrompts must be at most maxPrompts: lower minPrompts or raise maxPrompts",
                {"minPrompts": 32},
                {"minPrompts": 33},
            ),
            (
                "lengthBuckets",
                "lengthBuckets must ascend, each once: sort them",
                {"lengthBuckets": [1, 2]},
                {"lengthBuckets": [1, 1]},
            ),
            (
                "lengthBuckets",
                "lengthBuckets must ascend, each once: sort them",
                {"lengthBuckets": []},
                {"lengthBuckets": [2, 1]},
            ),
            (
                "latencyClasses",
                "latencyClasses must ascend by priority, each once: sort them",
                {
                    "latencyClasses": [
                        {"priority": 0, "windowMilliseconds": 1},
                        {"priority": 1, "windowMilliseconds": 1},
                    ]
                },
                {
                    "latencyClasses": [
                        {"priority": 1, "windowMilliseconds": 1},
                        {"priority": 0, "windowMilliseconds": 1},
                    ]
                },
            ),
        )
    ),
    at("spec.placement", {"minTransferGBps": 1.5}),
    at("spec.placement", {"domainLabel": "rack"}),
    at("spec.placement", {"gang": "PodGroup"}),
    at("spec.placement", {"gang": "Volcano", "queue": "gpus"}),
    *(
        both(right, at(f"{AUTOSCALE}.mode", "On"))
        for right, wrong in (
            (CEILINGS, SAME),
            (CEILINGS, at("spec.roles.prefill.pools.0.maxReplicas", 4)),
            (CEILINGS, at("spec.roles.decode.pools.0.maxReplicas", 4)),
            (
                at(f"{AUTOSCALE}.budget", {"total": 4}),
                at(f"{AUTOSCALE}.budget", {"perGpu": {"cpu": 4}}),
            ),
            (both(only("mixed"), at("spec.roles.mixed.pools.0.maxReplicas", 4)), only("mixed")),
        )
    ),
    night(role="prefill"),
    *(
        both(
            at("spec.accelerators", {"A1": {}}),
            at(f"{AUTOSCALE}.{field}", {"A1": 1, "H100": 2}),
        )
        for field, wrong in (
            ("budget.perGpu", at(f"{AUTOSCALE}.budget.perGpu", {"A1": 1})),
            ("cost", at(f"{AUTOSCALE}.cost", {"A1": 1})),
        )
    ),
    night(minReplicas=2, maxReplicas=2),
    night(maxReplicas=None, minReplicas=0),
    night(name="night-2"),
    *(both(only(role), many(role, 4096)) for role in (*ROLES, *ENGINELESS)),
    *(both(only(role), pools_in_all(role, 16)) for role in ("prefill", "decode", *ENGINELESS)),
]
