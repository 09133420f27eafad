"""Roles and pools, accelerators and network policy of a PDCluster spec."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Final, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_snake

from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.ports import MAX_PODS
from pdcluster_schema.quantities import Quantity, ResourceClaims, ResourcesSpec
from pdcluster_schema.section import Cel, Crd, Many, Rule, SpecSection, ascending, rule, spelled
from pdcluster_schema.values import (
    MAX_SECONDS,
    MAX_WORKERS,
    Above0,
    HardwareNumber,
    Name,
    PodTemplate,
    Ranks,
    Replicas,
    Text,
    is_label,
)

STARTUP_SECONDS = 3600
"""Time to start where none is given: hundreds of gigabytes of weights on a network volume take this
order of time.
"""


class Metadata(SpecSection):
    """Name and namespace of the object; labels and annotations are the user's own."""

    name: Name
    namespace: Annotated[
        str,
        spelled(
            r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
            "a namespace",
            "use at most 63 lower-case letters, digits and '-'",
        ),
    ] = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


MAX_RESOURCE = 317
"""Characters of a resource, or of a label: a domain of at most 253, `/`, a name of at most 63."""


COMPUTING = ("prefill", "decode", "mixed")
MAX_POOLS = 16
"""Pools of all roles together."""
ROUTER: Final = "router"
PICKER: Final = "picker"
ENGINELESS = (ROUTER, PICKER)
"""Roles without an engine, whose workers hold no KV."""
ROLES = (*COMPUTING, *ENGINELESS)
MAX_ACCELERATORS = 64


def _sum(number: str, most: int) -> str:
    parts = [f"(has(self.{role}) ? {number.format(role=role)} : 0)" for role in ROLES]
    return f"{' + '.join(parts)} <= {most}"


class AcceleratorSpec(SpecSection):
    """One type of accelerator. It keeps its resource and nodeLabels as long as it is defined. Of a
    type that the operator knows, what is left out stays as the operator has it: each number, and
    where its pods run unless resource or nodeLabels is given.
    """

    resource: Annotated[Text, Field(max_length=MAX_RESOURCE)] | None = None
    """Resource that a pod requests, as in nvidia.com/gpu; by default only cpu and memory."""
    node_labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that carry it."""
    memory_bytes: HardwareNumber | None = None
    """Memory of one, in bytes; with bandwidthBytes the decode capacity that autoscale.ratio counts.
    By default not known.
    """
    bandwidth_bytes: HardwareNumber | None = None
    """Bytes per second of its memory; by default not known, and it weighs as one H100."""
    bf16_flops: HardwareNumber | None = None
    """Dense BF16 operations per second, for the prefill capacity, and over bandwidthBytes the
    default of prefillLengthThreshold. By default not known.
    """
    fp8_flops: HardwareNumber | None = None
    """Dense FP8 operations per second, of engines that compute in FP8; by default those of
    bf16Flops.
    """
    fp4_flops: HardwareNumber | None = None
    """Dense FP4 operations per second, of engines that compute in FP4; by default those of
    bf16Flops.
    """
    link_bytes: HardwareNumber | None = None
    """Bytes per second in one direction over all its links of NVLink, xGMI and the like; by default
    not known.
    """
    network_bytes: HardwareNumber | None = None
    """Bytes per second in one direction over its node's network, for each accelerator; by default
    not known.
    """
    price_per_hour: Above0 | None = None
    """Price of one for an hour, in any currency; the operator's metrics and dashboard show what the
    cluster costs, and it counts as autoscale.cost where that names no type. By default none.
    """

    RULES = (
        Cel(
            "(has(self.resource) ? self.resource : '') == (has(oldSelf.resource) ? "
            "oldSelf.resource : '') && (has(self.nodeLabels) && size(self.nodeLabels) > 0 ? "
            "has(oldSelf.nodeLabels) && self.nodeLabels == oldSelf.nodeLabels : "
            "!has(oldSelf.nodeLabels) || size(oldSelf.nodeLabels) == 0)",
            "the definition of an accelerator cannot change: add a type under another name, "
            "and pools of it",
        ),
    )

    @property
    def has_place(self) -> bool:
        """True if it says where its pods run."""
        return self.resource is not None or bool(self.node_labels)


class PoolSpec(SpecSection):
    """Replicas of one role on one type of accelerator."""

    name: Name
    """Unique within the role."""
    gpu: Annotated[str, Crd(maxLength=63)] = "cpu"
    """Type of accelerator: A10, A100-40GB, A100-80GB, B200, B300, GAUDI3, GB200, GB300, H100, H20,
    H200, L4, L40S, MI300X, MI355X, RTX-PRO-6000, RUBIN-CPX, T4, cpu or one of spec.accelerators.
    """
    gpus_per_replica: Ranks | None = None
    """Accelerators of one worker, which autoscale counts and pods request; by default one for each
    rank, tensorParallelSize times pipelineParallelSize of the engine, and dataParallelSize of vllm.
    """
    pods_per_replica: Annotated[int, Field(ge=1, le=MAX_PODS), Crd(format="int32")] | None = None
    """Pods of one worker, a group that starts, drains and restarts as one (docs/groups.md): a stock
    engine's ranks are divided among them, and each has one of the dataParallelSize engines of
    ours. By default as many as gpusPerPod needs for the ranks, or 1.
    """
    gpus_per_pod: Annotated[int, Field(ge=1, le=16), Crd(format="int32")] | None = None
    """Most accelerators of one pod. By default 8, and 4 of GB200 and GB300."""
    replicas: Replicas
    """Workers to run, of all pools together at most 4096. A change is a request to scale, like one
    through /scale of the pool's PDPoolScaler.
    """
    min_replicas: Replicas | None = None
    """Fewest workers that replicas may ever be.  With 0 in all pools, and routers, autoscale.mode
    On takes every role to zero while no request comes (docs/autoscaling.md).
    """
    max_replicas: Replicas | None = None
    """Most workers that replicas may ever be."""
    flexible: bool | None = None
    """Workers of this pool may serve the other role for a time, without a restart, where
    autoscale.budget or capacity stops that one from growing: one pool of prefill and one of decode,
    on one type of accelerator (docs/autoscaling.md). minReplicas and maxReplicas then bound the
    workers that serve the pool's role.
    """

    RULES = (
        ascending("minReplicas", "maxReplicas"),
        Rule(
            cel="!has(self.minReplicas) || self.replicas >= self.minReplicas",
            holds=lambda pool: pool.replicas >= (pool.min_replicas or 0),
            reason="must be at least {minReplicas}",
            fix="raise replicas or lower minReplicas",
            at="replicas",
        ),
        Rule(
            cel="!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
            holds=lambda pool: pool.max_replicas is None or pool.replicas <= pool.max_replicas,
            reason="must be at most {maxReplicas}",
            fix="lower replicas or raise maxReplicas",
            at="replicas",
        ),
        is_label("self.name", ".name"),
        Cel(
            "self.gpu == oldSelf.gpu",
            "gpu of a pool cannot change: add a pool under another name, and remove this one",
            ".gpu",
        ),
        Cel(
            "self.gpu == 'cpu' || self.?gpusPerReplica.orValue(0) == "
            "oldSelf.?gpusPerReplica.orValue(0)",
            "gpusPerReplica of a pool cannot change: add a pool under another name, and remove "
            "this one",
            ".gpusPerReplica",
        ),
        Cel(
            "self.?podsPerReplica.orValue(0) == oldSelf.?podsPerReplica.orValue(0) && "
            "self.?gpusPerPod.orValue(0) == oldSelf.?gpusPerPod.orValue(0)",
            "podsPerReplica and gpusPerPod of a pool cannot change: add a pool under another name, "
            "and remove this one",
            ".podsPerReplica",
        ),
        Rule(
            cel="!has(self.gpusPerPod) || self.gpu != 'cpu'",
            holds=lambda pool: pool.gpus_per_pod is None or pool.gpu != NO_ACCELERATOR,
            reason="means nothing on a pool with gpu: cpu",
            fix="leave it out, or give the pool a gpu",
            at="gpusPerPod",
        ),
    )


class RoleSpec(SpecSection):
    """The workers of one role."""

    pools: Annotated[
        tuple[PoolSpec, ...],
        Many,
        Crd(minItems=1, maxItems=MAX_POOLS, list_type="map", list_map_keys=["name"]),
    ]
    """Replicas by type of accelerator; at most 16 pools in all roles together."""
    engine: EngineSpec = EngineSpec()
    resources: ResourcesSpec = ResourcesSpec()
    resource_claims: ResourceClaims = ()
    """Claims of the pod, each used by the container that computes: worker, or a stock engine's."""
    shared_memory: Quantity | None = None
    """Most that a worker may keep in /dev/shm, which counts as its memory; by default 1Gi, and 8Gi
    with a stock engine.
    """
    startup_timeout_seconds: Annotated[int, Field(ge=10, le=MAX_SECONDS)] | None = None
    """Seconds that a worker may take to load its model before it is started again, by default 3600;
    at most rollout.progressDeadlineSeconds.
    """
    pod_template: PodTemplate = Field(default_factory=dict)
    """Metadata and spec of a pod, merged strategically over what the operator renders: lists of
    named things by their names. A role's goes over that of spec; the container engine, device
    claims and the runtime class of accelerators in that of spec leave routers out. At most 32 KiB
    as JSON each, and the whole spec 128 KiB.
    """

    @property
    def startup_seconds(self) -> int:
        return self.startup_timeout_seconds or STARTUP_SECONDS

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 1 <= len(self.pools) <= MAX_POOLS:
            raise rule(
                f"must hold 1 to {MAX_POOLS} pools, not {len(self.pools)}",
                "add or remove pools",
                at="pools",
            )
        repeated = [
            name for name, count in Counter(pool.name for pool in self.pools).items() if count > 1
        ]
        if repeated:
            second = [index for index, pool in enumerate(self.pools) if pool.name == repeated[0]][1]
            raise rule(
                f"{repeated[0]!r} names two pools of this role",
                "give each pool its own name",
                at=f"pools[{second}].name",
            )
        return self


def _engineless_rules(name: str) -> Iterator[Rule]:
    def pools(roles: "RolesSpec") -> tuple[PoolSpec, ...]:
        role = roles.engineless().get(name)
        return () if role is None else role.pools

    def computing(roles: "RolesSpec") -> int:
        return next(i for i, pool in enumerate(pools(roles)) if pool.gpu != NO_ACCELERATOR)

    def lacks(field: str) -> Callable[["RolesSpec"], bool]:
        return lambda roles: (
            (role := roles.engineless().get(name)) is None or field not in role.model_fields_set
        )

    for field, why in (("engine", "have no engine"), ("resourceClaims", "compute nothing")):
        yield Rule(
            cel=f"!has(self.{name}) || !has(self.{name}.{field})",
            holds=lacks(to_snake(field)),
            reason=f"is not for {name}s, which {why}",
            fix="remove it",
            at=f"{name}.{field}",
        )
    yield Rule(
        cel=f"!has(self.{name}) || self.{name}.pools.all(p, p.gpu == 'cpu')",
        holds=lambda roles: all(pool.gpu == NO_ACCELERATOR for pool in pools(roles)),
        reason=f"must have gpu: cpu, since a {name} computes nothing",
        fix="leave gpu out",
        at=f"{name}.pools",
        found=lambda roles: pools(roles)[computing(roles)].gpu,
        place=lambda roles: f"[{computing(roles)}]",
    )
    yield Rule(
        cel=f"!has(self.{name}) || self.{name}.pools.all(p, p.?podsPerReplica.orValue(1) == 1)",
        holds=lambda roles: all(pool.pods_per_replica in (None, 1) for pool in pools(roles)),
        reason=f"must have podsPerReplica 1, since a {name} is one process",
        fix="leave podsPerReplica out",
        at=f"{name}.pools",
        found=lambda roles: max(pool.pods_per_replica or 1 for pool in pools(roles)),
    )


class RolesSpec(SpecSection):
    """Either prefill and decode, or mixed. With router workers without an engine take the requests
    of clients, and keep models listed while the others are at zero; where none is asked for, decode
    or mixed workers take them. With picker workers without an engine choose a decode or mixed
    worker for each request of a gateway (service.endpointPicker).
    """

    prefill: RoleSpec | None = None
    decode: RoleSpec | None = None
    mixed: RoleSpec | None = None
    router: RoleSpec | None = None
    picker: RoleSpec | None = None

    RULES = (
        *(
            Cel(
                f"!self.?{role}.?engine.?type.hasValue()",
                "engine.type is of the whole cluster, since KV moves between engines of one type: "
                "set it in spec.engine",
                f".{role}",
            )
            for role in COMPUTING
        ),
        Rule(
            cel="has(self.mixed) ? !has(self.prefill) && !has(self.decode) : has(self.prefill) && "
            "has(self.decode)",
            holds=lambda roles: set(roles.computing()) in ({"prefill", "decode"}, {"mixed"}),
            reason="must be exactly prefill and decode, or mixed",
            fix="add the missing role or remove the others; router and picker go with either",
            found=lambda roles: " and ".join(sorted(roles.present())) or "nothing",
        ),
        Rule(
            cel=_sum("self.{role}.pools.map(p, p.replicas).sum()", MAX_WORKERS),
            holds=lambda roles: sum(pool.replicas for pool in roles.pools()) <= MAX_WORKERS,
            reason=f"replicas of all pools must be at most {MAX_WORKERS} together",
            fix="lower some, or make another PDCluster",
            found=lambda roles: sum(pool.replicas for pool in roles.pools()),
        ),
        Rule(
            cel=_sum("size(self.{role}.pools)", MAX_POOLS),
            holds=lambda roles: len(roles.pools()) <= MAX_POOLS,
            reason=f"pools of all roles must be at most {MAX_POOLS} together",
            fix="join some, or make another PDCluster",
            found=lambda roles: len(roles.pools()),
        ),
        *(each for role in ENGINELESS for each in _engineless_rules(role)),
    )

    def pools(self) -> list[PoolSpec]:
        """Those of all roles."""
        return [pool for role in self.present().values() for pool in role.pools]

    def present(self) -> dict[str, RoleSpec]:
        """The roles that are given, by name, in a fixed order."""
        return {**self.computing(), **self.engineless()}

    def engineless(self) -> dict[str, RoleSpec]:
        """Those of them whose workers have none."""
        roles = {ROUTER: self.router, PICKER: self.picker}
        return {name: role for name, role in roles.items() if role is not None}

    def computing(self) -> dict[str, RoleSpec]:
        """Those of them whose workers have an engine."""
        roles = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return {name: role for name, role in roles.items() if role is not None}


class NetworkPolicySpec(SpecSection):
    """Access to the workers and the etcd."""

    enabled: bool = True
    """Only this cluster's workers and the operator reach gRPC, KV and etcd ports; HTTP stays open
    to all.
    """
