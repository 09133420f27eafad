"""A writer in a process of its own, to be killed: one short transfer, then one that goes on.

Arguments: transport, KV port, the receiver's engine id and address, two epochs.  It says on its
output what becomes of them, a word for each.
"""

import random
import sys
import threading

from pdcluster_worker.engine.ports import BlocksSent
from pdcluster_worker.kv_transfer.tcp import TcpSettings, TcpTransport
from tests.worker.kv_transfer.conftest import ByteMemory, Engine

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 32
BYTES_PER_SECOND = 32 << 20
"""The long transfer takes a second, and the test kills the writer well within."""


def main(transport: str, port: str, to: str, address: str, short: str, long: str) -> None:
    memory = ByteMemory(BLOCK_BYTES, NUM_BLOCKS)
    engine = Engine(f"writer-{random.getrandbits(64):x}", memory)
    settings = TcpSettings(bandwidth=BYTES_PER_SECOND, verify=True, transport=transport)
    own = engine.transport = TcpTransport(
        memory, engine.engine_id, ("127.0.0.1", int(port)), engine.awake.set, settings
    )
    own.write(bytes.fromhex(short), to, [address], [(0, 0)])
    (sent,) = engine.wait_for(BlocksSent)
    say(sent.route.transport, str(own.checksum(bytes.fromhex(short))))
    pairs = [(block, block) for block in range(1, NUM_BLOCKS)]
    own.write(bytes.fromhex(long), to, [address], pairs)
    engine.wait_for(BlocksSent, 3)
    say("begun")
    threading.Event().wait()


def say(*words: str) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
