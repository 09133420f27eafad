"""The queue from a port's threads to the engine loop.

Events keep the order in which they were put; `wake` is called after each, from
whichever thread put it, so it must be thread-safe, quick and must not call
back into the port.
"""

from collections import deque
from collections.abc import Callable

from pdcluster_worker.kv_transfer.head_shards import ShardEvent


class EventQueue:
    """Many threads put, one polls; neither waits."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events: deque[ShardEvent] = deque()
        self._wake = wake

    def put(self, event: ShardEvent) -> None:
        """Add an event and wake the engine loop."""
        self._events.append(event)
        self._wake()

    def poll(self) -> list[ShardEvent]:
        """Take everything there is, oldest first."""
        return [self._events.popleft() for _ in range(len(self._events))]
