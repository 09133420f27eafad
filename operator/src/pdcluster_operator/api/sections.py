"""The sections of a PDCluster spec: frozen models, camelCase in YAML, strict types, no unknown field.

A section exists here only when something reads it.  Units are in the names or
the docstrings; the CRD (`crds/pdcluster.yaml`) says the same to the API
server, and `tests/contract` holds the two together.
"""

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from pdcluster_operator.api.accelerators import accelerators
from pdcluster_operator.api.names import dns_label
from pdcluster_operator.api.quantity import Quantity
from pdcluster_operator.api.rules import rule

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Weight = Annotated[float, Field(ge=0.0)]
Name = Annotated[str, AfterValidator(dns_label)]
Text = Annotated[str, Field(min_length=1)]
Many = Field(strict=False)  # a list in YAML, a tuple here
MAX_POOLS = 16


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, alias_generator=to_camel)


class ModelSpec(Section):
    """Which model.

    name:  what clients call it
    path:  its Hugging Face folder, on every worker; `~` and paths relative to the file are for `pdctl` only
    dtype: of weights and KV; auto = bfloat16 where the machine computes it natively, else float32
    """

    name: Text
    path: Text
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class EngineSpec(Section):
    """Sizes of the engine.  On a role, only the values that are given count: they go over those of `spec.engine`.

    block_size:            tokens of one KV block
    max_batched_tokens:    token budget of one step
    max_sequences:         most requests in one step
    max_model_len:         longest prompt + output in tokens; None = the model's own limit
    kv_cache_memory:       bytes for KV blocks (512Mi in YAML); ignored when num_blocks is given
    num_blocks:            KV blocks; None = as many as kv_cache_memory holds
    threads:               CPU threads of the model; 0 = from the machine
    transfer_bandwidth:    most bytes per second of KV that a worker sends; 0 = no limit
    verify_transfers:      send and compare a checksum of every KV transfer
    fence_timeout_seconds: a fence older than this is reported; its blocks stay quarantined
    """

    block_size: Positive = 16
    max_batched_tokens: Positive = 256
    max_sequences: Positive = 64
    max_model_len: Positive | None = None
    scheduler: Literal["continuous"] = "continuous"
    prefix_caching: bool = True
    kv_cache_dtype: Literal["auto"] = "auto"
    kv_cache_memory: Quantity = 1 << 30
    num_blocks: Positive | None = None
    threads: Natural = 0
    transport: Literal["tcp"] = "tcp"
    transfer_bandwidth: Natural = 0
    verify_transfers: bool = False
    fence_timeout_seconds: Annotated[float, Field(gt=0.0)] = 30.0

    def overridden_by(self, role_engine: "EngineSpec") -> "EngineSpec":
        """This engine with the values that `role_engine` was given."""
        return self.model_copy(update={name: getattr(role_engine, name) for name in role_engine.model_fields_set})


class PoolSpec(Section):
    """Replicas of one role on one type of accelerator; min and max bound every later change of `replicas`."""

    name: Name
    gpu: str = "cpu"
    gpus_per_replica: Positive = 1
    replicas: Natural
    min_replicas: Natural | None = None
    max_replicas: Natural | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpu not in accelerators():
            raise rule(f"{self.gpu!r} is not a known accelerator", f"use one of {', '.join(sorted(accelerators()))}", at="gpu")
        if self.gpus_per_replica != 1:
            raise rule(
                f"must be 1, not {self.gpus_per_replica}", "workers run without tensor parallelism: use more replicas", at="gpusPerReplica"
            )
        low, high = self.min_replicas or 0, self.max_replicas
        if high is not None and low > high:
            raise rule(f"must be at most maxReplicas ({high}), not {low}", "lower minReplicas or raise maxReplicas", at="minReplicas")
        if self.replicas < low:
            raise rule(f"must be at least minReplicas ({low}), not {self.replicas}", "raise replicas or lower minReplicas", at="replicas")
        if high is not None and self.replicas > high:
            raise rule(f"must be at most maxReplicas ({high}), not {self.replicas}", "lower replicas or raise maxReplicas", at="replicas")
        return self


class RoleSpec(Section):
    """One role: its pools, and its own engine values over `spec.engine`."""

    pools: Annotated[tuple[PoolSpec, ...], Many]
    engine: EngineSpec = EngineSpec()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 1 <= len(self.pools) <= MAX_POOLS:
            raise rule(f"must hold 1 to {MAX_POOLS} pools, not {len(self.pools)}", "add or remove pools", at="pools")
        repeated = [name for name, count in Counter(pool.name for pool in self.pools).items() if count > 1]
        if repeated:
            second = [index for index, pool in enumerate(self.pools) if pool.name == repeated[0]][1]
            raise rule(f"{repeated[0]!r} names two pools of this role", "give each pool its own name", at=f"pools[{second}].name")
        return self


class RolesSpec(Section):
    """Either prefill and decode, or mixed (both phases in one worker: the baseline)."""

    prefill: RoleSpec | None = None
    decode: RoleSpec | None = None
    mixed: RoleSpec | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = set(self.present())
        if found not in ({"prefill", "decode"}, {"mixed"}):
            listed = ", ".join(sorted(found)) or "nothing"
            raise rule(f"must be exactly {{prefill, decode}} or {{mixed}}, not {{{listed}}}", "add the missing role or remove the others")
        return self

    def present(self) -> dict[str, RoleSpec]:
        """The roles that are given, by name, in a fixed order."""
        roles = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return {name: role for name, role in roles.items() if role is not None}


class OffloadSpec(Section):
    """Numbers of the offload decision [O1]: uncached prompt tokens, requests in the prefill queue, running decodes."""

    prefill_length_threshold: Natural = 256
    prefill_queue_max: Natural = 10
    decode_load_threshold: Natural = 8
    min_offload_length: Natural = 64


class PrefillScoreSpec(Section):
    """Choice among prefill workers with credit: lowest loadWeight * queued tokens - prefixWeight * matched tokens."""

    prefix_weight: Weight = 1.0
    load_weight: Weight = 1.0


class CreditsSpec(Section):
    """How far ahead of its engine a prefill worker accepts work: batchesAhead * maxBatchedTokens tokens."""

    batches_ahead: Annotated[float, Field(gt=0.0, le=1000.0)] = 2.0


class RoutingSpec(Section):
    """Policy: where a request's prefill runs; takes effect without a restart."""

    offload: OffloadSpec = OffloadSpec()
    prefill_score: PrefillScoreSpec = PrefillScoreSpec()
    credits: CreditsSpec = CreditsSpec()


class AdmissionSpec(Section):
    """Bounds of an ingress worker; beyond them a request is answered 503 (queue, in requests) or 413 (body, in bytes)."""

    max_queued_requests: Positive = 1024
    max_body_bytes: Positive = 4 << 20


class QosSpec(Section):
    """Policy: which requests are accepted; takes effect without a restart."""

    admission: AdmissionSpec = AdmissionSpec()


class EtcdSpec(Section):
    """endpoints: host:port of an etcd to use; none = one is started for this cluster."""

    endpoints: Annotated[tuple[Annotated[str, Field(pattern=r"^[^\s:/]+:[0-9]{1,5}$")], ...], Many] = ()


class DiscoverySpec(Section):
    """How the workers of a cluster find each other."""

    etcd: EtcdSpec = EtcdSpec()


class ServiceSpec(Section):
    """port: where the OpenAI API is served."""

    port: Port = 8000
