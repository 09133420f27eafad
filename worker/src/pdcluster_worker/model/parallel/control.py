"""Messages between rank 0 and another rank of its engine: packets over a socket pair.

To a rank: setup, cache, then steps and warm-ups.  Each is answered by DONE, or FAILED and a reason.
"""

import socket
from collections.abc import Sequence
from typing import Final

import msgspec

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import ModelConfig

DONE: Final = b"+"
FAILED: Final = b"!"
STEP: Final = b"S"
WARM_UP: Final = b"W"
MAX_BYTES = 64 << 10  # of one message; a plan's arrays travel by shared memory


class RankSetup(msgspec.Struct, frozen=True):
    """First message.  store: rendezvous file of the ranks."""

    rank: int
    model: ModelConfig
    engine: EngineConfig
    device: str
    threads: int
    store: str


class CacheSetup(msgspec.Struct, frozen=True):
    """Second message, with descriptors of the plan slots and, on CPUs, of the shared KV cache."""

    num_blocks: int


_encode = msgspec.json.Encoder().encode
decode_setup = msgspec.json.Decoder(RankSetup).decode
decode_cache = msgspec.json.Decoder(CacheSetup).decode


def send_setup(control: socket.socket, setup: RankSetup) -> None:
    control.send(_encode(setup))


def send_cache(control: socket.socket, setup: CacheSetup, descriptors: Sequence[int]) -> None:
    socket.send_fds(control, [_encode(setup)], descriptors)


def receive_cache(control: socket.socket) -> tuple[CacheSetup, Sequence[int]] | None:
    """None where rank 0 is gone."""
    data, descriptors, _, _ = socket.recv_fds(control, MAX_BYTES, 2)
    return (decode_cache(data), descriptors) if data else None
