"""`python -m pdcluster_worker.processes.rank_process CONTROL [KV_CHANNEL]`: a rank after rank 0.

An error ends it, and so the engine.
"""

import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.errors import ModelError
from pdcluster_worker.kv_transfer.rank_port import serve_in_thread
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.decoder import Decoder
from pdcluster_worker.model.decoder_loader import open_decoder
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.kv_size import stored_kv
from pdcluster_worker.model.loading.adapter import with_adapters
from pdcluster_worker.model.loading.loader import load_model
from pdcluster_worker.model.memory import attach, release_library_pages
from pdcluster_worker.model.parallel import control as wire
from pdcluster_worker.model.parallel.device_parts import handle_of, rank_cache
from pdcluster_worker.model.parallel.group import RankGroup, rank_device
from pdcluster_worker.model.rank_layout import ParallelRank
from pdcluster_worker.model.step_plan import StepLimits
from pdcluster_worker.system.process import die_with_parent, start_logging, trim_memory

logger = logging.getLogger(__name__)


class RankProcess:
    """on_cache: called with its part of the KV cache where this rank transfers KV."""

    def __init__(
        self, control: socket.socket, setup: wire.RankSetup, on_cache: Callable[[KVMemory], None]
    ) -> None:
        self._control = control
        self._on_cache = on_cache
        self._setup = setup
        engine = setup.engine
        self._place = ParallelRank(
            engine.tensor_parallel_size, engine.pipeline_parallel_size, setup.rank
        )

    def run(self) -> None:
        """Returns when rank 0 closes the socket.  Raises errors of loading and steps."""
        setup = self._setup
        loaded = load_model(
            Path(setup.model.path).expanduser(),
            setup.model.dtype,
            block_size=setup.engine.block_size,
            max_model_len=setup.engine.max_model_len,
            threads=setup.threads,
            kv_dtype=setup.engine.kv_cache_dtype,
            quantization=setup.engine.quantization,
        )
        loaded = with_adapters(loaded, setup.model.adapter_paths)
        if loaded.checkpoint is None:
            raise ModelError(loaded.reason)
        self._control.send(wire.DONE)
        received = wire.receive_cache(self._control)
        if received is None:
            return
        num_blocks, (plan_memory, *cache_memory) = received
        limits = StepLimits.of(setup.engine, loaded.info.max_model_len)
        device = rank_device(setup.device, setup.rank)
        cache, handle = self._open_cache(loaded.info.geometry, num_blocks, cache_memory, device)
        slots = wire.PlanSlots(attach(plan_memory), limits)
        group = RankGroup(self._place, Path(setup.store), device)
        decoder = open_decoder(
            loaded.checkpoint,
            stored_kv(cache, loaded.info.geometry),
            limits,
            invariant=setup.engine.batch_invariant,
            rank=self._place,
            group=group,
        )
        del loaded
        gc.collect()
        trim_memory()
        release_library_pages()
        gc.freeze()
        self._control.send(wire.DONE + handle)
        logger.info(
            "rank %d of %d computes operations=%s",
            setup.rank,
            self._place.num_ranks,
            decoder.operations.name,
        )
        with torch.inference_mode():
            self._serve(decoder, group, slots)

    def _open_cache(
        self, geometry: KVGeometry, num_blocks: int, shared: Sequence[int], device: torch.device
    ) -> tuple[Tensor, bytes]:
        """This rank's part of the cache, and a handle where rank 0 maps it."""
        if shared:
            cache = KVCache(geometry, num_blocks, shared[0], self._place)
            if cache.heads:
                self._on_cache(cache)
            return cache.part(self._place), b""
        own = rank_cache(geometry, num_blocks, self._place, device)
        if self._place.pipeline_size > 1:
            return own.tensor, handle_of(own.tensor)
        self._on_cache(own)
        return own.tensor, b""

    def _serve(self, decoder: Decoder, group: RankGroup, slots: wire.PlanSlots) -> None:
        while message := self._control.recv(wire.MAX_BYTES):
            kind, data = message[:1], message[1:]
            if kind == wire.WARM_UP:
                decoder.warm_up(int.from_bytes(data, "big"))
            else:
                logits = decoder.logits(slots.read(data))
                if self._place.is_last and self._place.pipeline_size > 1 and len(logits):
                    group.answer_logits(logits)
                if logits.is_cuda:
                    torch.cuda.synchronize()  # its blocks may be read once we answer
            self._control.send(wire.DONE)


def main() -> int:
    """Returns when rank 0 is gone; 1 after a failure, which was sent to rank 0."""
    die_with_parent()
    start_logging()
    descriptors = [int(argument) for argument in sys.argv[1:]]

    def on_cache(memory: KVMemory) -> None:
        serve_in_thread(socket.socket(fileno=descriptors[1]), memory)

    with socket.socket(fileno=descriptors[0]) as control:
        setup = wire.decode_setup(control.recv(wire.MAX_BYTES))
        try:
            RankProcess(control, setup, on_cache).run()
        except Exception as e:
            logger.exception("rank %d failed", setup.rank)
            control.send(wire.FAILED + f"{type(e).__name__}: {e}".encode()[: wire.MAX_BYTES - 1])
            return 1
    return 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # As the engine process: nothing is left to save, and torch would report what it leaks.
    os._exit(status)
