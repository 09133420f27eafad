"""`python -m pdcluster_worker.processes.rank_start CONTROL [KV_CHANNEL]`: one rank process."""

import logging
import os
import socket
import sys

from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.kv_transfer.rank_port import serve_in_thread
from pdcluster_worker.model.parallel import control as wire
from pdcluster_worker.model.parallel.rank_process import RankProcess
from pdcluster_worker.system.process import die_with_parent, start_logging

logger = logging.getLogger(__name__)


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
