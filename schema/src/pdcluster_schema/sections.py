"""The sections of a PDCluster spec: frozen models, camelCase in YAML, strict types, no unknown
field.

A section exists here only when something reads it.  Units are in the names or
the docstrings; the CRD (`crds/pdcluster.yaml`) says the same to the API
server, and `tests/contract` holds the two together.
"""

from collections import Counter
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.quantity import Quantity
from pdcluster_schema.resources import ResourcesSpec
from pdcluster_schema.rules import rule, spelled
from pdcluster_schema.section import Many, SpecSection
from pdcluster_schema.service import CorsSpec, EndpointPickerSpec, HttpLimitsSpec
from pdcluster_schema.values import (
    MAX_SECONDS,
    MAX_WORKERS,
    ChatTemplate,
    Endpoint,
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
MAX_ENDPOINTS = 16
MAX_ACCELERATORS = 64
MAX_RESOURCE = 317
"""Characters of a resource: a domain of at most 253, `/`, and a name of at most 63."""


class PvcSpec(SpecSection):
    """A volume that holds model folders; `model.path` is then below its root."""

    claim_name: ObjectName


class HuggingFaceSpec(SpecSection):
    """A repository of the Hugging Face hub, downloaded before a worker starts.

    revision:     a commit, tag or branch
    token_secret: a Secret whose key `HF_TOKEN` or `token` reads a gated or private repository
    """

    repo: Annotated[
        str,
        Field(max_length=200),
        spelled(
            r"[\w.-]+(/[\w.-]+)?",
            "a repository",
            "write it like HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    ]
    revision: Text = "main"
    token_secret: ObjectName | None = None


class ModelSpec(SpecSection):
    """The model, and its Hugging Face folder: a path (in the image or on a volume) or the hub.

    name:       what clients call it; `pdctl up` looks for its folder by this name in its cache
    path:       its folder as the workers see it, or below the volume's root; `~` and relative paths
                without a volume are for `pdctl` only
    dtype:      of weights and KV; auto = bfloat16 where the first worker's device computes it
                natively, else float32
    chat_template: Jinja text in place of the model's own chat template, or `chatml-tools`, which is
                   for requests with tools
    tool_parser, reasoning_parser: how the model writes calls of tools, and its reasoning; auto = as
                                   its chat template says
    node_cache: folder of the node that keeps downloads for the next pod there; without it each pod
                downloads for itself
    """

    name: Text
    path: Text | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    chat_template: ChatTemplate | None = None
    tool_parser: Literal[
        "auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "qwen", "qwen3_coder"
    ] = "auto"
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3"] = "auto"
    pvc: PvcSpec | None = None
    hugging_face: HuggingFaceSpec | None = None
    node_cache: (
        Annotated[
            str,
            Field(max_length=4096),
            spelled(r"/[^\n]+", "an absolute path", "write it like /var/cache/models"),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.hugging_face is None):
            raise rule(
                "needs either path or huggingFace, and not both",
                "give the one that the model comes from",
            )
        if self.pvc is not None and self.path is None:
            raise rule(
                "a volume needs the model's path in it", "give path, or leave pvc out", at="pvc"
            )
        if self.node_cache is not None and self.hugging_face is None:
            raise rule(
                "keeps downloads, and nothing is downloaded",
                "give huggingFace, or leave nodeCache out",
                at="nodeCache",
            )
        return self


class ImageSpec(SpecSection):
    """The worker image.  name: None = the one that the operator was installed with, kept for the
    life of a revision.
    """

    name: Text | None = None
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: Annotated[tuple[ObjectName, ...], Many] = ()


class AcceleratorSpec(SpecSection):
    """A type of accelerator that accelerators.yaml does not have, or in the place of one that it
    has.  Numbers are per accelerator, as in that file; None = not known.

    resource:    what a pod asks for, as in nvidia.com/gpu; None = nothing but cpu and memory
    node_labels: labels of the nodes that carry it
    memory_bytes:    its memory
    bandwidth_bytes: bytes per second of its memory
    bf16_flops, fp8_flops, fp4_flops: dense operations per second
    """

    resource: Annotated[Text, Field(max_length=MAX_RESOURCE)] | None = None
    node_labels: dict[str, str] = Field(default_factory=dict)
    memory_bytes: HardwareNumber | None = None
    bandwidth_bytes: HardwareNumber | None = None
    bf16_flops: HardwareNumber | None = None
    fp8_flops: HardwareNumber | None = None
    fp4_flops: HardwareNumber | None = None


class PoolSpec(SpecSection):
    """Replicas of one role on one type of accelerator; min and max bound every later change of
    `replicas`.

    gpus_per_replica: accelerators of one worker; None = one for each rank of its engine
    """

    name: Name
    gpu: str = "cpu"
    gpus_per_replica: Ranks | None = None
    replicas: Replicas
    min_replicas: Replicas | None = None
    max_replicas: Replicas | None = None

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
    """One role: its pools, its own engine values over `spec.engine`, and its pod template merged
    over `spec.podTemplate`.
    """

    pools: Annotated[tuple[PoolSpec, ...], Many]
    engine: EngineSpec = EngineSpec()
    resources: ResourcesSpec = ResourcesSpec()
    pod_template: PodTemplate = Field(default_factory=dict)

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
    """Either prefill and decode, or mixed (both phases in one worker: the baseline); before either,
    routers.

    router: workers without an engine that take the requests of clients; None = decode or mixed
            workers take them
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


class StorageSpec(SpecSection):
    """A volume for each member of the cluster's etcd.  retain: keep it when the PDCluster is
    deleted.
    """

    size: Quantity
    class_name: Text | None = None
    retain: bool = False


class EtcdSpec(SpecSection):
    """The etcd that holds the workers' leased records: given endpoints, or one that is run for this
    cluster.

    endpoints:  host:port of an etcd to use; none = one is run
    tls_secret: a Secret with ca.crt, and tls.crt and tls.key if the etcd asks for a client
                certificate; with endpoints only
    replicas:   members of the one that is run
    image:      of the one that is run; None = the operator's setting
    storage:    None = kept in memory and written again by the workers after a restart
    """

    endpoints: Annotated[tuple[Endpoint, ...], Many, Field(max_length=MAX_ENDPOINTS)] = ()
    tls_secret: ObjectName | None = None
    replicas: Literal[1, 3] = 1
    image: Text | None = None
    storage: StorageSpec | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tls_secret is not None and not self.endpoints:
            raise rule(
                "is for endpoints, and none are given",
                "give endpoints, or leave tlsSecret out",
                at="tlsSecret",
            )
        if self.storage is not None and self.endpoints:
            raise rule(
                "is for an etcd that is run here, and endpoints are given",
                "leave storage or endpoints out",
                at="storage",
            )
        if self.replicas > 1 and self.storage is None and not self.endpoints:
            raise rule(
                "3 members need storage: one that lost its data could not come back",
                "give storage, or replicas: 1",
                at="storage",
            )
        return self


class DiscoverySpec(SpecSection):
    """Discovery of the workers of a cluster by each other."""

    etcd: EtcdSpec = EtcdSpec()


class ServiceSpec(SpecSection):
    """Service of the OpenAI API.

    port:           of the Service; with `pdctl`, of the first ingress worker
    annotations:    of the Service, as a load balancer wants them
    api_key_secret: a Secret each of whose values is a key that clients may present as
                    `Authorization: Bearer`; None = no key is asked for
    shared_prefix_cache: all keys share cached KV blocks; otherwise each key has its own
    cors:           which web pages may call the API; by default none of another origin
    limits:         of what one client may send and hold open
    endpoint_picker: of an InferencePool, for gateways; None = none is made
    """

    port: Port = 8000
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    annotations: dict[str, str] = Field(default_factory=dict)
    api_key_secret: ObjectName | None = None
    shared_prefix_cache: bool = False
    cors: CorsSpec = CorsSpec()
    limits: HttpLimitsSpec = HttpLimitsSpec()
    endpoint_picker: EndpointPickerSpec | None = None


class RolloutSpec(SpecSection):
    """Replacement of the old revision by a new one.

    strategy:             BlueGreen = beside the old, then traffic switches; Recreate = the old goes
                          first, where accelerators are short
    grace_period_seconds: what a stopped worker has to finish its streams before it is killed
    progress_deadline_seconds: for which no more workers of a new revision need become ready; then
                               it has stalled, and is given up
    drain_timeout_seconds: what a worker that is scaled away has to finish them before it is
                           stopped; None = as long as it takes
    """

    strategy: Literal["BlueGreen", "Recreate"] = "BlueGreen"
    grace_period_seconds: Annotated[int, Field(ge=10, le=MAX_SECONDS)] = 300
    drain_timeout_seconds: WholeSeconds | None = None
    progress_deadline_seconds: Annotated[int, Field(ge=30, le=MAX_SECONDS)] = 3600


class NetworkPolicySpec(SpecSection):
    """enabled: let only this cluster's workers and the operator reach its gRPC, KV and etcd ports;
    HTTP stays open to all.
    """

    enabled: bool = True
