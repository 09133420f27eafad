"""Joins a loaded model, its KV cache and a device's operations into a forward pass."""

import logging

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.decoder import Decoder
from pdcluster_worker.model.decoder_weights import pack_decoder
from pdcluster_worker.model.device_cache import DeviceKVCache
from pdcluster_worker.model.forward import Forward
from pdcluster_worker.model.generic import Generic, pack_linears, unpack
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loading.loader import LoadedModel
from pdcluster_worker.model.loading.probe import probe
from pdcluster_worker.model.ops.choose import make_operations
from pdcluster_worker.model.ops.operations import Operations
from pdcluster_worker.model.ops.step_limits import StepLimits

logger = logging.getLogger(__name__)


def assemble(
    loaded: LoadedModel, cache: KVCache | DeviceKVCache, limits: StepLimits, *, invariant: bool
) -> Forward:
    """invariant: a row's bits do not depend on the batch.

    Raises ModelError where neither our decoder nor transformers' code can run so on the device.
    """
    operations = make_operations(cache.tensor, loaded.attention, limits, invariant=invariant)
    if loaded.checkpoint is not None:
        weights = pack_decoder(loaded.checkpoint, loaded.info.max_model_len, operations)
        shape = loaded.attention
        return _logged(Decoder(operations, weights, shape.num_heads * shape.head_dim))
    if invariant:
        raise ModelError(
            f"engine.batchInvariant needs our own decoder: {loaded.reason}; leave it out"
        )
    if cache.tensor.device.type != "cpu":
        raise ModelError(
            f"{loaded.reason}; other models run by transformers' code, on CPUs only: set "
            "engine.device: cpu"
        )
    _pack(loaded, operations)
    return _logged(Generic(loaded.module, operations))


def _logged(forward: Forward) -> Forward:
    logger.info("computes with operations=%s code=%s", forward.operations.name, forward.code)
    return forward


def _pack(loaded: LoadedModel, operations: Operations) -> None:
    """Pack the module's linear layers, unless its code reads them directly and then fails."""
    packed = pack_linears(loaded.module, operations)
    try:
        probe(loaded.module, loaded.info.geometry.num_layers, loaded.info.max_model_len)
    except ModelError as e:
        logger.warning("the model's products stay as they are, which is slower: %s", e)
        unpack(packed)
