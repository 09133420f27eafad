"""Joins a loaded model, its KV cache and a device's operations into a forward pass."""

import logging

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model import logits_check
from pdcluster_worker.model.decoder import Decoder
from pdcluster_worker.model.device_cache import DeviceKVCache
from pdcluster_worker.model.families import UnsupportedArchError, read_weights
from pdcluster_worker.model.forward import Forward
from pdcluster_worker.model.generic import Generic, pack_linears, unpack
from pdcluster_worker.model.kv_cache import DTYPES, KVCache
from pdcluster_worker.model.loading.loader import LoadedModel
from pdcluster_worker.model.loading.probe import probe
from pdcluster_worker.model.ops.choose import make_operations
from pdcluster_worker.model.ops.operations import Operations
from pdcluster_worker.model.ops.step_limits import StepLimits

logger = logging.getLogger(__name__)


def assemble(
    loaded: LoadedModel, cache: KVCache | DeviceKVCache, limits: StepLimits, *, invariant: bool
) -> Forward:
    """Our decoder where it supports the model and passes the logits check, else transformers' code.

    invariant: a row's bits do not depend on the batch.
    Raises ModelError where neither can run so; UnsupportedArchError for a wrong inspection answer.
    """
    operations = make_operations(cache.tensor, loaded.attention, limits, invariant=invariant)
    try:
        forward: Forward = _proven_decoder(loaded, operations, cache.num_blocks)
    except UnsupportedArchError as e:
        if loaded.answer is not None:
            raise  # what it has of a module cannot compute
        reason = str(e)
    else:
        return _logged(forward)
    if invariant:
        raise ModelError(f"engine.batchInvariant needs our own decoder: {reason}; leave it out")
    if cache.tensor.device.type != "cpu":
        raise ModelError(
            f"{reason}; other models run by transformers' code, on CPUs only: set engine.device: "
            "cpu"
        )
    logger.info("the model runs by transformers' code, which is slower: %s", reason)
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


def _proven_decoder(loaded: LoadedModel, operations: Operations, num_blocks: int) -> Decoder:
    """Raises UnsupportedArchError when it does not support this model or its logits differ."""
    weights = read_weights(
        loaded.module, loaded.info.max_model_len, operations, loaded.info.windows
    )
    decoder = Decoder(operations, weights, loaded.attention.num_heads * loaded.attention.head_dim)
    prove(decoder, loaded, num_blocks)
    return decoder


def prove(ours: Forward, loaded: LoadedModel, num_blocks: int) -> None:
    """Compare logits with transformers'; raises UnsupportedArchError where they differ."""
    theirs = logits_check.expected_logits(loaded) if loaded.answer is None else loaded.answer
    found = logits_check.logits_difference(
        ours,
        theirs,
        loaded.info,
        min(num_blocks, logits_check.num_blocks(loaded.info.geometry.block_size)),
    )
    if not found <= logits_check.MAX_DIFFERENCE[DTYPES[loaded.info.dtype]]:
        logger.warning(
            "our decoder's logits differ from transformers' by %.3g of their size: not used", found
        )
        raise UnsupportedArchError("our decoder computes something else")
    logger.info("our decoder's logits differ from transformers' by %.2g of their size", found)
