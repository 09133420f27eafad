"""The PDCluster object: metadata, spec, and the rules that span sections.

A PDCluster that exists as a value here has passed every rule; code above never
checks again.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pdcluster_schema.accelerators import NO_ACCELERATOR, Accelerator, accelerators
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.engine_rules import (
    engine_faults,
    gpus_per_replica,
    misfit,
    pods_per_replica,
    startup_rule,
)
from pdcluster_schema.kv_tier_rules import kv_dtype_fault, memory_fault
from pdcluster_schema.model import ImageSpec, ModelSpec
from pdcluster_schema.placement import PlacementSpec
from pdcluster_schema.qos import QosSpec
from pdcluster_schema.quantities import number_of
from pdcluster_schema.rollout import RolloutSpec, Strategy, smallest_percentage
from pdcluster_schema.routing import DEFAULT_LENGTH_THRESHOLD, RoutingSpec
from pdcluster_schema.section import SpecSection, rule
from pdcluster_schema.sections import (
    ENGINELESS,
    MAX_ACCELERATORS,
    ROLES,
    AcceleratorSpec,
    Metadata,
    NetworkPolicySpec,
    PoolSpec,
    RolesSpec,
)
from pdcluster_schema.service import DiscoverySpec, ServiceSpec
from pdcluster_schema.spec_rules import spec_rules
from pdcluster_schema.stock_rules import stock_fault
from pdcluster_schema.stock_versions import image_fault, published_version
from pdcluster_schema.values import PodTemplate, SizeOfSpec
from pdcluster_schema.workload import (
    MAX_GROUPED_NAME,
    MAX_WORKLOAD_NAME,
    REVISION_LENGTH,
    workload_name,
)

KIND = "PDCluster"
_OTHER_VENDORS = ("amd.com/", "habana.ai/")


class PDClusterSpec(SpecSection):
    """Desired state of the cluster."""

    model: ModelSpec
    roles: RolesSpec
    image: ImageSpec = ImageSpec()
    engine: EngineSpec = EngineSpec()
    accelerators: Annotated[dict[str, AcceleratorSpec], Field(max_length=MAX_ACCELERATORS)] = Field(
        default_factory=dict
    )
    """Types of accelerator by the name that a pool's gpu takes, in addition to those that the
    operator knows, or with other values for one of those.
    """
    routing: RoutingSpec = RoutingSpec()
    qos: QosSpec = QosSpec()
    discovery: DiscoverySpec = DiscoverySpec()
    service: ServiceSpec = ServiceSpec()
    placement: PlacementSpec | None = None
    autoscale: AutoscaleSpec = AutoscaleSpec()
    rollout: RolloutSpec = RolloutSpec()
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    pod_template: PodTemplate = Field(default_factory=dict)
    """Metadata and spec of a pod, merged strategically over what the operator renders: lists of
    named things by their names. A role's goes over that of spec; the container engine, device
    claims and the runtime class of accelerators in that of spec leave routers out. At most 32 KiB
    as JSON each, and the whole spec 128 KiB.
    """

    RULES = (*spec_rules(), *map(startup_rule, ROLES))

    @model_validator(mode="after")
    def _gpu_known(self) -> Self:
        known = {*accelerators(), *self.accelerators}
        for name, role in self.roles.present().items():
            for index, pool in enumerate(role.pools):
                if pool.gpu not in known:
                    fix = (
                        f"use one of {', '.join(sorted(known))}, or define it in spec.accelerators"
                    )
                    raise rule(
                        f"{pool.gpu!r} is not a known accelerator",
                        fix,
                        at=f"roles.{name}.pools[{index}].gpu",
                    )
        return self

    @model_validator(mode="after")
    def _autoscale_speaks_of_what_there_is(self) -> Self:
        """A schedule or a limit that speaks of nothing would look as if it held."""
        known = {*accelerators(), *self.accelerators}
        for path, types in (
            ("budget.perGpu", self.autoscale.budget.per_gpu),
            ("cost", self.autoscale.cost),
        ):
            for gpu in types:
                if gpu not in known:
                    fix = (
                        f"use one of {', '.join(sorted(known))}, or define it in spec.accelerators"
                    )
                    raise rule(
                        f"{gpu!r} is not a known accelerator", fix, at=f"autoscale.{path}.{gpu}"
                    )
        roles = self.roles.computing()
        for index, schedule in enumerate(self.autoscale.schedules):
            names = (
                [pool.name for pool in roles[schedule.role].pools] if schedule.role in roles else []
            )
            if schedule.pool not in names:
                at = f"autoscale.schedules[{index}].{'pool' if names else 'role'}"
                if not names:
                    raise rule(
                        f"{schedule.role!r} is no role of this cluster",
                        f"use one of {', '.join(roles)}, or remove the schedule",
                        at=at,
                    )
                fix = f"use one of {', '.join(names)}, or remove the schedule"
                raise rule(f"{schedule.pool!r} is no pool of role {schedule.role}", fix, at=at)
        return self

    @model_validator(mode="after")
    def _objectives_are_measured(self) -> Self:
        """Beside a stock engine only its own prompts that waited for no other are timed."""
        if self.engine.is_stock and self.autoscale.objective.queue is not None:
            raise rule(
                f"is not measured with engine.type {self.engine.type}, whose prefill workers do "
                "not say how long a request waited",
                "set autoscale.objective.ttft in its place",
                at="autoscale.objective.queue",
            )
        return self

    @model_validator(mode="after")
    def _engine_has_its_own_fields(self) -> Self:
        """A field of the other type of engine would look as if it held."""
        sections = {"engine": self.engine} | {
            f"roles.{name}.engine": role.engine for name, role in self.roles.computing().items()
        }
        for path, engine in sections.items():
            if path != "engine" and "type" in engine.model_fields_set:
                reason = "is of the whole cluster, since KV moves between engines of one type"
                raise rule(reason, "set it in spec.engine", at=f"{path}.type")
            for fault in engine_faults(self.engine.type, engine):
                raise rule(fault.reason, fault.fix, at=f"{path}.{fault.field}")
        return self

    @model_validator(mode="after")
    def _quantities_of_engines_fit(self) -> Self:
        fault = (
            stock_fault(self)
            if self.engine.is_stock
            else memory_fault(self) or kv_dtype_fault(self)
        )
        if fault is not None:
            place, reason, fix = fault
            raise rule(reason, fix, at=place)
        return self

    @model_validator(mode="after")
    def _engines_are_of_one_known_version(self) -> Self:
        """By names and tags of their images.  No rule of the API server, too costly for it."""
        roles = self.roles.computing()
        for role, declared in roles.items():
            engine = self.engine_of(role)
            fault = image_fault(self.engine.type, engine.image, engine.allow_unknown_version)
            if fault is not None:
                at = "engine" if declared.engine.image is None else f"roles.{role}.engine"
                raise rule(*fault, at=f"{at}.image")
        found = {role: published_version(self.engine_of(role).image) for role in roles}
        if len(set(found.values()) - {""}) > 1:
            raise rule(
                f"is vLLM {found['decode']}, and that of prefill {found['prefill']}: KV moves "
                "between equal versions alone",
                "give both roles one version",
                at="roles.decode.engine.image",
            )
        return self

    @model_validator(mode="after")
    def _ranks_fit(self) -> Self:
        for name, role in self.roles.computing().items():
            if (problem := misfit(self.engine_of(name), role.pools)) is not None:
                field, reason, fix = problem
                raise rule(reason, fix, at=f"roles.{name}.{field}")
        roles, place = self.roles.computing(), self.placement
        has_groups = any(
            self.pods_per_replica(name, pool) > 1 for name in roles for pool in roles[name].pools
        )
        if place is not None and not has_groups and (field := place.of_groups):
            reason = f"is {getattr(place, field)}, for workers of several pods, and no pool has any"
            raise rule(
                reason, "leave it out, or give a pool podsPerReplica", at=f"placement.{field}"
            )
        return self

    @model_validator(mode="after")
    def _our_engine_has_operations_for_the_accelerator(self) -> Self:
        known = accelerators()
        for name, role in self.roles.computing().items():
            engine = self.engine_of(name)
            if engine.is_stock or engine.device == "cpu":
                continue
            for index, pool in enumerate(role.pools):
                own = self.accelerators.get(pool.gpu)
                is_own = own is not None and (own.has_place or pool.gpu not in known)
                if not is_own and (known[pool.gpu].resource or "").startswith(_OTHER_VENDORS):
                    raise rule(
                        f"is {pool.gpu}, and engine.type pdcluster computes on NVIDIA GPUs and "
                        "CPUs",
                        "set engine.type: vllm with an image for it, or engine.device: cpu",
                        at=f"roles.{name}.pools[{index}].gpu",
                    )
        return self

    @model_validator(mode="after")
    def _accelerators_are_those_of_the_pools(self) -> Self:
        """Another number in `resources` would be passed over."""
        for name, role in self.roles.computing().items():
            for pool in role.pools:
                resource = self.hardware(pool.gpu).resource or ""
                count = self.gpus_per_replica(name, pool) // self.pods_per_replica(name, pool)
                for field, amounts in role.resources:
                    if number_of(amounts.get(resource, count)) != count:
                        raise rule(
                            f"is {amounts[resource]}, and each pod of pool {pool.name} has "
                            f"{count}, by the ranks of its engine or gpusPerReplica",
                            "leave it out, and set those",
                            at=f"roles.{name}.resources.{field}.{resource}",
                        )
        return self

    @model_validator(mode="after")
    def _steps_have_a_worker(self) -> Self:
        """A percentage of a role's accelerators has to be one worker.  No rule of the API server,
        which it would cost too much.
        """
        if self.rollout_strategy != "Rolling":
            return self
        for name, role in self.roles.computing().items():
            workers = [(self.gpus_per_replica(name, pool), pool.replicas) for pool in role.pools]
            accelerators = sum(number * replicas for number, replicas in workers)
            most = max(number for number, _ in workers)
            if accelerators and not any(self.rollout.limits(accelerators, most)):
                field = "maxSurge" if self.rollout.surge not in (0, "0%") else "maxUnavailable"
                share = self.rollout.max_surge if field == "maxSurge" else self.rollout.unavailable
                raise rule(
                    f"{share} of the {accelerators} accelerators of {name} is less than one worker "
                    f"of {most}",
                    f'set at least "{smallest_percentage(accelerators, most)}%", or a number of '
                    "workers",
                    at=f"rollout.{field}",
                )
        return self

    def engine_of(self, role: str) -> EngineSpec:
        """The engine of one role: its own values over `spec.engine`; of routers, which have none,
        what they must know of the others'.
        """
        if role in ENGINELESS:
            decode = self.engine_of(self.decode_role)
            return EngineSpec().model_copy(
                update={"block_size": decode.block_size, "max_model_len": decode.max_model_len}
            )
        return self.engine.overridden_by(self.roles.present()[role].engine)

    def gpus_per_replica(self, role: str, pool: PoolSpec) -> int:
        """Accelerators of one worker of a pool, as its pods reserve them."""
        return gpus_per_replica(self.engine_of(role), pool)

    def pods_per_replica(self, role: str, pool: PoolSpec) -> int:
        """Pods of one worker of a pool; 1 = the worker is a pod."""
        return 1 if role in ENGINELESS else pods_per_replica(self.engine_of(role), pool)

    def accelerator_of(self, pool: PoolSpec) -> AcceleratorSpec:
        """Demand of the pool's gpu on a node: the object's own definition, or that of
        accelerators.yaml.
        """
        known = self.hardware(pool.gpu)
        return AcceleratorSpec.model_construct(
            resource=known.resource, node_labels=known.node_labels
        )

    def hardware(self, gpu: str) -> Accelerator:
        """The accelerator of a name, by the object's own definition over that of
        accelerators.yaml.
        """
        own, known = self.accelerators.get(gpu), accelerators().get(gpu)
        if own is None:
            return accelerators()[gpu]
        if known is None:
            return Accelerator.model_construct(source="spec.accelerators", **dict(own))
        place = {"resource": own.resource, "node_labels": own.node_labels}
        numbers = {
            name: value
            for name, value in own
            if value is not None and name not in (*place, "price_per_hour")
        }
        return known.model_copy(update={**numbers, **(place if own.has_place else {})})

    def price_per_hour(self, gpu: str) -> float | None:
        """Price of one accelerator; None = not given."""
        own = self.accelerators.get(gpu)
        return None if own is None else own.price_per_hour

    def length_thresholds(self) -> dict[str, int]:
        """`routing.offload.prefillLengthThreshold` by accelerator of the decode pools.

        As given; else its break-even length where that is known, or 256.
        """
        given, role = self.routing.offload.prefill_length_threshold, self.roles.decode
        gpus = {pool.gpu for pool in role.pools} if role is not None else set()
        return {gpu: self._threshold(gpu) if given is None else given for gpu in sorted(gpus)}

    def _threshold(self, gpu: str) -> int:
        known = self.hardware(gpu).break_even_tokens
        return DEFAULT_LENGTH_THRESHOLD if known is None else known

    @property
    def prefill_length_threshold(self) -> int:
        """The lowest of them."""
        return min(self.length_thresholds().values(), default=DEFAULT_LENGTH_THRESHOLD)

    @property
    def ingress_role(self) -> Literal["decode", "mixed", "router"]:
        """The role whose workers answer clients; routers of which none is asked for answer none."""
        router = self.roles.router
        has_routers = router is not None and any(pool.replicas for pool in router.pools)
        return "router" if has_routers else self.decode_role

    @property
    def may_sleep(self) -> bool:
        """True if the autoscaler may take the pools of all roles to zero."""
        pools = [pool for role in self.roles.computing().values() for pool in role.pools]
        return self.autoscale.mode == "On" and all(pool.min_replicas == 0 for pool in pools)

    @property
    def rollout_strategy(self) -> Strategy:
        if self.rollout.strategy is not None:
            return self.rollout.strategy
        pools = (pool for role in self.roles.computing().values() for pool in role.pools)
        has_front = self.roles.router is not None or self.roles.picker is not None
        on_accelerators = any(pool.gpu != NO_ACCELERATOR for pool in pools)
        rolls = self.rollout.implies_rolling or (on_accelerators and not has_front)
        return "Rolling" if rolls else "BlueGreen"

    @property
    def decode_role(self) -> Literal["decode", "mixed"]:
        """The role whose workers make the tokens of an answer."""
        return "mixed" if self.roles.mixed is not None else "decode"


class PDCluster(SpecSection):
    """One cluster of prefill and decode (or mixed) workers."""

    api_version: Literal["pdcluster.io/v1alpha1"]
    kind: Literal["PDCluster"]
    metadata: Metadata
    spec: Annotated[PDClusterSpec, SizeOfSpec]

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        for index, model in enumerate(self.spec.service.models):
            if model.cluster == self.metadata.name:
                fix, at = "name another one", f"spec.service.models[{index}].cluster"
                raise rule(f"{model.cluster!r} is this PDCluster", fix, at=at)
        for role, spec in self.spec.roles.present().items():
            for pool in spec.pools:
                full = workload_name(self.metadata.name, role, pool.name, "0" * REVISION_LENGTH)
                is_grouped = (pool.pods_per_replica or pool.gpus_per_pod or 1) > 1
                most = MAX_GROUPED_NAME if is_grouped else MAX_WORKLOAD_NAME
                if len(full) > most:
                    over = len(full) - most
                    of = "a workload's name" + (" of several pods" if is_grouped else "")
                    name = f"{self.metadata.name}-{role}-{pool.name}"
                    raise rule(
                        f"{name} with a revision is {len(full)} characters; {of} holds {most}",
                        f"shorten the name of the cluster or of the pool by {over}",
                        at="metadata.name",
                    )
        return self
