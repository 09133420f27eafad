"""vLLM's `--kv-transfer-config`: NIXL between prefill and decode workers, host memory behind it."""

import math
from typing import Any

from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.kv_transfer import HostMemorySpec, KvTransferSpec

_SHARED_GIB = 8  # A bound, not a reservation: ranks of one engine exchange tensors in it


def kv_transfer_config(
    engine: EngineSpec, *, on_cpu: bool, moves_kv: bool
) -> dict[str, Any] | None:
    """None without a connector.  moves_kv: the workers are prefill or decode ones.

    vLLM loads a prompt from the first connector that has it, and reads the policy of the outermost.
    """
    given = engine.kv_transfer or KvTransferSpec()
    fail, recompute = ({"kv_load_failure_policy": policy} for policy in ("fail", "recompute"))
    buffers = {"kv_buffer_device": "cpu"} if on_cpu else {}
    if given.offload is None:
        return _connector(given.connector, fail | buffers, _of_nixl(given)) if moves_kv else None
    if not moves_kv:
        return _connector("OffloadingConnector", recompute, _of_offloading(given.offload, engine))
    connectors = [
        _connector(given.connector, buffers, _of_nixl(given)),
        _connector("OffloadingConnector", {}, _of_offloading(given.offload, engine)),
    ]
    return _connector("MultiConnector", fail, {"connectors": connectors})


def shared_memory(engine: EngineSpec, pods: int) -> str:
    """Size of /dev/shm of each pod of a worker, which holds what its ranks offload."""
    offload = engine.kv_transfer and engine.kv_transfer.offload
    offloaded = offload.of_pod(pods, engine.data_parallel_size) if offload else 0
    return f"{_SHARED_GIB + math.ceil(offloaded / 2**30)}Gi"


def _connector(name: str, more: dict[str, str], extra: dict[str, Any]) -> dict[str, Any]:
    config = {"kv_connector": name, "kv_role": "kv_both", **more}
    return {**config, "kv_connector_extra_config": extra} if extra else config


def _of_nixl(given: KvTransferSpec) -> dict[str, Any]:
    backends = {"backends": list(given.backends)} if given.backends else {}
    return {**(given.extra_config or {}), **backends}


def _of_offloading(given: HostMemorySpec, engine: EngineSpec) -> dict[str, Any]:
    """Each data-parallel rank takes as much as it is given."""
    extra = {
        "cpu_bytes_to_use": given.memory // engine.data_parallel_size,
        "blocks_per_chunk": given.blocks_per_chunk,
        "eviction_policy": given.eviction_policy,
    }
    return {key: value for key, value in extra.items() if value is not None}
