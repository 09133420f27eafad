"""The PDCluster object: metadata, spec, and the rules that span sections.

A PDCluster that exists as a value here has passed every rule; code above never
checks again.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from pdcluster_operator.api.names import MAX_WORKLOAD_NAME, REVISION_LENGTH, workload_name
from pdcluster_operator.api.rules import rule
from pdcluster_operator.api.sections import (
    DiscoverySpec,
    EngineSpec,
    ModelSpec,
    Name,
    QosSpec,
    RolesSpec,
    RoutingSpec,
    Section,
    ServiceSpec,
)

KIND = "PDCluster"
_KV_FIELDS = ("block_size", "kv_cache_dtype")  # what both ends of a KV transfer must share, besides the model


class Metadata(Section):
    """Name and namespace of the object; labels and annotations are the user's own."""

    name: Name
    namespace: Name = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class PDClusterSpec(Section):
    """What to serve and how."""

    model: ModelSpec
    roles: RolesSpec
    engine: EngineSpec = EngineSpec()
    routing: RoutingSpec = RoutingSpec()
    qos: QosSpec = QosSpec()
    discovery: DiscoverySpec = DiscoverySpec()
    service: ServiceSpec = ServiceSpec()

    @model_validator(mode="after")
    def _kv_compatible(self) -> Self:
        engines = {name: self.engine_of(name) for name in self.roles.present()}
        for field in _KV_FIELDS:
            values = {name: getattr(engine, field) for name, engine in engines.items()}
            if len(set(values.values())) > 1:
                alias = EngineSpec.model_fields[field].alias
                found = " and ".join(f"{value} for {name}" for name, value in values.items())
                raise rule(
                    f"KV blocks move between roles, but {alias} is {found}", "give both roles the same", at=f"roles.decode.engine.{alias}"
                )
        return self

    @model_validator(mode="after")
    def _step_has_room_for_every_sequence(self) -> Self:
        for name in self.roles.present():
            engine = self.engine_of(name)
            if engine.max_batched_tokens < engine.max_sequences:
                raise rule(
                    f"must be at least maxSequences ({engine.max_sequences}), for a step computes a token of each sequence",
                    "raise maxBatchedTokens or lower maxSequences",
                    at=f"roles.{name}.engine.maxBatchedTokens",
                )
        return self

    def engine_of(self, role: str) -> EngineSpec:
        """The engine of one role: its own values over `spec.engine`."""
        return self.engine.overridden_by(self.roles.present()[role].engine)


class PDCluster(Section):
    """One cluster of prefill and decode (or mixed) workers."""

    api_version: Literal["pdcluster.io/v1alpha1"]
    kind: Literal["PDCluster"]
    metadata: Metadata
    spec: PDClusterSpec

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        for role, spec in self.spec.roles.present().items():
            for pool in spec.pools:
                full = workload_name(self.metadata.name, role, pool.name, "0" * REVISION_LENGTH)
                if len(full) > MAX_WORKLOAD_NAME:
                    over = len(full) - MAX_WORKLOAD_NAME
                    name = f"{self.metadata.name}-{role}-{pool.name}"
                    raise rule(
                        f"{name} with a revision is {len(full)} characters; a workload's name holds {MAX_WORKLOAD_NAME}",
                        f"shorten the name of the cluster or of the pool by {over}",
                        at="metadata.name",
                    )
        return self
