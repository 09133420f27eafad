"""The sections of a PDCluster spec that have no file of their own: roles and pools, accelerators,
service, rollout and network policy.  A section exists only when something reads it.
"""

from collections import Counter
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.crd.keywords import Crd
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.ports import HTTP_PORT
from pdcluster_schema.resources import ResourcesSpec
from pdcluster_schema.rules import rule
from pdcluster_schema.section import Many, SpecSection
from pdcluster_schema.service import CorsSpec, EndpointPickerSpec, HttpLimitsSpec
from pdcluster_schema.values import (
    MAX_SECONDS,
    MAX_WORKERS,
    HardwareNumber,
    Name,
    ObjectName,
    PodTemplate,
    Port,
    Ranks,
    Replicas,
    Text,
    WholeSeconds,
)

MAX_POOLS = 16
"""Pools of all roles together."""
ROUTER: Final = "router"  # the one role without an engine
MAX_ACCELERATORS = 64
MAX_RESOURCE = 317
"""Characters of a resource: a domain of at most 253, `/`, and a name of at most 63."""


class AcceleratorSpec(SpecSection):
    """One type of accelerator; it keeps its resource and nodeLabels as long as it is defined."""

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


class PoolSpec(SpecSection):
    """Replicas of one role on one type of accelerator."""

    name: Name
    """Unique within the role."""
    gpu: Annotated[str, Crd(maxLength=63)] = "cpu"
    """Type of accelerator; B200, B300, GB200, GB300, H100, H200, cpu or one of spec.accelerators.
    """
    gpus_per_replica: Ranks | None = None
    """Accelerators of one worker, which autoscale counts and pods request; by default one for each
    rank, tensorParallelSize times pipelineParallelSize of the engine.
    """
    replicas: Replicas
    """Workers to run, of all pools together at most 4096. A change is a request to scale, like one
    through /scale of the pool's PDPoolScaler.
    """
    min_replicas: Replicas | None = None
    """Fewest workers that replicas may ever be."""
    max_replicas: Replicas | None = None
    """Most workers that replicas may ever be."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.min_replicas or 0, self.max_replicas
        if high is not None and low > high:
            raise rule(
                f"must be at most maxReplicas ({high}), not {low}",
                "lower minReplicas or raise maxReplicas",
                at="minReplicas",
            )
        if self.replicas < low:
            raise rule(
                f"must be at least minReplicas ({low}), not {self.replicas}",
                "raise replicas or lower minReplicas",
                at="replicas",
            )
        if high is not None and self.replicas > high:
            raise rule(
                f"must be at most maxReplicas ({high}), not {self.replicas}",
                "lower replicas or raise maxReplicas",
                at="replicas",
            )
        return self


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
    pod_template: PodTemplate = Field(default_factory=dict)
    """Metadata and spec of a pod, merged strategically over what the operator renders: lists of
    named things by their names. A role's goes over that of spec; the container engine, device
    claims and the runtime class of accelerators in that of spec leave routers out. At most 32 KiB
    as JSON each, and the whole spec 128 KiB.
    """

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


class RolesSpec(SpecSection):
    """Either prefill and decode, or mixed. With router workers without an engine take the requests
    of clients, and keep models listed while the others are at zero; where none is asked for, decode
    or mixed workers take them.
    """

    prefill: RoleSpec | None = None
    decode: RoleSpec | None = None
    mixed: RoleSpec | None = None
    router: RoleSpec | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = set(self.computing())
        if found not in ({"prefill", "decode"}, {"mixed"}):
            listed = ", ".join(sorted(found)) or "nothing"
            raise rule(
                f"must be exactly {{prefill, decode}} or {{mixed}}, not {{{listed}}}",
                "add the missing role or remove the others",
            )
        requested = sum(pool.replicas for role in self.present().values() for pool in role.pools)
        if requested > MAX_WORKERS:
            reason = (
                f"replicas of all pools must be at most {MAX_WORKERS} together, not {requested}"
            )
            raise rule(reason, "lower some, or make another PDCluster")
        pools = sum(len(role.pools) for role in self.present().values())
        if pools > MAX_POOLS:
            reason = f"pools of all roles must be at most {MAX_POOLS} together, not {pools}"
            raise rule(reason, "join some, or make another PDCluster")
        return self

    @model_validator(mode="after")
    def _router_computes_nothing(self) -> Self:
        if self.router is None:
            return self
        if "engine" in self.router.model_fields_set:
            raise rule("is not for routers, which have no engine", "remove it", at="router.engine")
        for index, pool in enumerate(self.router.pools):
            if pool.gpu != NO_ACCELERATOR:
                raise rule(
                    f"is {pool.gpu}, and a router computes nothing",
                    "leave gpu out",
                    at=f"router.pools[{index}].gpu",
                )
        return self

    def present(self) -> dict[str, RoleSpec]:
        """The roles that are given, by name, in a fixed order."""
        routers = {} if self.router is None else {ROUTER: self.router}
        return {**self.computing(), **routers}

    def computing(self) -> dict[str, RoleSpec]:
        """Those of them whose workers have an engine."""
        roles = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return {name: role for name, role in roles.items() if role is not None}


class ServiceSpec(SpecSection):
    """Service of the OpenAI API."""

    port: Port = HTTP_PORT
    """HTTP port of the Service."""
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Type of the Service."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the Service, for a load balancer."""
    api_key_secret: ObjectName | None = None
    """A Secret each of whose values is a key that clients may present as `Authorization: Bearer`;
    by default no key is asked for.
    """
    shared_prefix_cache: bool = False
    """Let all API keys share cached KV blocks. By default each key has its own: with a shared cache
    the holder of one key can find out, by `cached_tokens` and by time, how prompts of another
    begin. Takes effect without a restart.
    """
    cors: CorsSpec = CorsSpec()
    limits: HttpLimitsSpec = HttpLimitsSpec()
    endpoint_picker: EndpointPickerSpec | None = None


class RolloutSpec(SpecSection):
    """Replacement of an old revision by a new one."""

    strategy: Literal["BlueGreen", "Recreate"] = "BlueGreen"
    """BlueGreen = beside the old, then traffic switches; Recreate = the old goes first, where
    accelerators are short.
    """
    grace_period_seconds: Annotated[int, Field(ge=10, le=MAX_SECONDS)] = 300
    """Seconds that a stopped worker has to finish its streams before it is killed."""
    drain_timeout_seconds: WholeSeconds | None = None
    """Seconds that a worker which is scaled away has to finish its streams before it is stopped; by
    default as long as it takes.
    """
    progress_deadline_seconds: Annotated[int, Field(ge=30, le=MAX_SECONDS)] = 3600
    """Seconds for which no more workers of a new revision need become ready. Then the object has
    stalled, and while another revision serves the new one is scaled to 0, until the spec or this
    number changes.
    """


class NetworkPolicySpec(SpecSection):
    """Access to the workers and the etcd."""

    enabled: bool = True
    """Only this cluster's workers and the operator reach gRPC, KV and etcd ports; HTTP stays open
    to all.
    """
