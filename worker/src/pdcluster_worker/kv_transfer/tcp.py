"""KV blocks over TCP and its carriers, the transport between processes.

This process's port, and those of the engine's other ranks.
"""

from collections.abc import Callable, Sequence

from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.kv_transfer.head_shards import ShardPort
from pdcluster_worker.kv_transfer.sharded import ShardedTransport
from pdcluster_worker.kv_transfer.tcp_port import TcpPort, TcpSettings

DEFAULT_SETTINGS = TcpSettings()


class TcpTransport(ShardedTransport):
    """`engine.ports.Transport`; listens from construction to `close`.

    own: the port of this process.  Raises ConfigError if it cannot be bound, or has not the
         transport that is asked for.
    """

    def __init__(
        self,
        memory: KVMemory,
        engine_id: str,
        listen: tuple[str, int],
        wake: Callable[[], None],
        settings: TcpSettings = DEFAULT_SETTINGS,
        *,
        others: Sequence[ShardPort] = (),
    ) -> None:
        """others: ports of the engine's other ranks, whose heads follow those of `memory`."""
        self.own = TcpPort(memory, engine_id, listen, wake, settings)
        super().__init__([self.own, *others], wake)
