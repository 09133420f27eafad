"""The section `engine.kvTransfer`: how a stock vLLM moves KV, and keeps it in host memory.

Checked in the connectors of vLLM 0.32; `manifests.vllm_connectors` renders it.
"""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from pdcluster_schema.quantities import Quantity
from pdcluster_schema.section import Cel, Crd, Many, SpecSection, rule
from pdcluster_schema.text import shortened
from pdcluster_schema.values import Positive, Text

NIXL: Final = "NixlConnector"

_NO_HANDLE = "gives a decode worker no handle of the KV that a prefill worker keeps for it"
_BREAKS: Final = {
    "MooncakeConnector": (
        "begins both legs of a request at once, by a transfer id, and keeps a prompt's KV for "
        "480 s where its decode worker is lost"
    ),
    "NixlPushConnector": (
        "holds the blocks of a request that ended until its prefill worker has written them, and "
        "for good where that one is lost"
    ),
    "LMCacheConnectorV1": f"{_NO_HANDLE}, and computes what its store lacks without saying so",
    "LMCacheMPConnector": f"{_NO_HANDLE}, and computes what its store lacks without saying so",
    "MultiConnector": "is what PDCluster sets for kvTransfer.offload",
    "OffloadingConnector": "moves no KV between workers, and is what kvTransfer.offload adds",
}
"""Promises of a remote prefill that each connector of vLLM breaks."""

_OWNED_KEYS: Final = {
    "backends": ("is a field", "set kvTransfer.backends in its place"),
    "connectors": ("is set by PDCluster", "set kvTransfer.offload in its place"),
    "enforce_handshake_compat": (
        "lets engines read KV that they hold in different forms",
        "remove it, and give both roles the same --attention-backend in engine.args",
    ),
    "bidirectional_kv_xfer": (
        "keeps the KV of each answer for 480 s, and no prefill worker fetches it",
        "remove it",
    ),
}
"""Keys of NIXL that PDCluster sets or cannot work with: the reason and the fix of each."""

KV_LEASE_KEY: Final = "kv_lease_duration"
LEAST_KV_LEASE_SECONDS: Final = 30
"""vLLM's default.  A decode worker may read a prompt's KV so long after its prefill."""

KNOWN_KEYS: Final = ("num_threads", KV_LEASE_KEY, "engine_ttl")
"""Keys of NIXL whose numbers mean something here; vLLM ignores one that it does not know."""

MAX_KEYS = 16


def _check_connector(name: str) -> str:
    if name != NIXL:
        reason = _BREAKS.get(name, _NO_HANDLE)
        raise rule(f"{name} {reason}", f"use {NIXL}, or leave it out")
    return name


def _check_keys(values: dict[str, int]) -> dict[str, int]:
    for key, value in values.items():
        if key == KV_LEASE_KEY and value < LEAST_KV_LEASE_SECONDS:
            raise rule(
                f"{key} is {value}, and a decode worker may read KV for {LEAST_KV_LEASE_SECONDS} s",
                f"give {LEAST_KV_LEASE_SECONDS} or more, or leave it out",
            )
        if key in _OWNED_KEYS:
            reason, fix = _OWNED_KEYS[key]
            raise rule(f"{key} {reason}", fix)
        if key not in KNOWN_KEYS:
            raise rule(
                f"{shortened(key, 60)} is no key of NIXL's that means something here",
                f"use {', '.join(KNOWN_KEYS)}, or remove it",
            )
    return values


def _check_backends(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise rule(f"{names[0]} is given twice", "remove one of them")
    return names


class HostMemorySpec(SpecSection):
    """Host memory below the KV cache of an accelerator: prefixes that leave the cache are read back
    from there, by vLLM's OffloadingConnector. They are not in the index that routing goes by.
    """

    memory: Quantity
    """Memory of one worker, of all its ranks together, such as 200Gi. Each pod has that of its
    data-parallel ranks in /dev/shm, which grows by that and counts to resources.limits of the role.
    """
    blocks_per_chunk: Positive | None = None
    """KV blocks that move at a time; by default vLLM's, 1."""
    eviction_policy: Literal["lru", "arc"] | None = None
    """Order in which blocks are dropped where the memory is full; by default vLLM's, lru."""

    def of_pod(self, pods: int, data_parallel_size: int) -> int:
        """Bytes in each pod of a worker.  A data-parallel rank over several pods maps all of its
        own in each of them, and vLLM (0.32) ends where /dev/shm has no room for it.
        """
        return -(-self.memory // min(pods, data_parallel_size))


class KvTransferSpec(SpecSection):
    """Connector by which a stock vLLM moves KV blocks between prefill and decode workers. A role's
    values go over those of spec.engine, one by one. For type vllm.
    """

    connector: Annotated[
        Text,
        Field(max_length=63),
        AfterValidator(_check_connector),
        Crd(
            Cel(
                f"self == '{NIXL}'",
                f"not a connector that keeps what is promised of remote prefills: use {NIXL}, or "
                "leave it out (docs/engines.md)",
            )
        ),
    ] = NIXL
    """vLLM's connector; others break what is promised of a remote prefill, and are refused with
    what they break. Default NixlConnector.
    """
    backends: (
        Annotated[
            tuple[Annotated[Literal["UCX", "LIBFABRIC"], Crd(maxLength=9)], ...],
            Many,
            Field(min_length=1, max_length=2),
            Crd(list_type="set"),
            AfterValidator(_check_backends),
        ]
        | None
    ) = None
    """Transports of NIXL, the same for prefill and decode: LIBFABRIC for EFA. By default UCX."""
    extra_config: (
        Annotated[
            dict[str, Annotated[int, Field(ge=0, le=10**9)]],
            Field(max_length=MAX_KEYS),
            AfterValidator(_check_keys),
            Crd(
                Cel(
                    f"self.all(key, key in {list(KNOWN_KEYS)})",
                    f"a key other than {', '.join(KNOWN_KEYS)}: remove it, and give "
                    "kvTransfer.backends for backends and kvTransfer.offload for connectors",
                ),
            ),
        ]
        | None
    ) = None
    """More numbers of NIXL's kv_connector_extra_config: num_threads (with UCX alone),
    kv_lease_duration (at least 30) and engine_ttl.
    """
    offload: HostMemorySpec | None = None

    def overridden_by(self, role: "KvTransferSpec") -> "KvTransferSpec":
        """This section with the values that `role` was given."""
        given = {name: getattr(role, name) for name in role.model_fields_set}
        return self.model_copy(update={n: each for n, each in given.items() if each is not None})
