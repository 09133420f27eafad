"""The queue from a transport's threads to the engine loop.

Events keep the order in which they were put; `wake` is called after each, from
whichever thread put it, so it must be thread-safe, quick and must not call
back into the transport.
"""

from collections import deque
from collections.abc import Callable

from pdcluster_worker.engine.ports import TransferEvent


class EventQueue:
    """Many threads put, one polls; neither waits."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events: deque[TransferEvent] = deque()
        self._wake = wake

    def put(self, event: TransferEvent) -> None:
        """Add an event and wake the engine loop."""
        self._events.append(event)
        self._wake()

    def poll(self) -> list[TransferEvent]:
        """Take everything there is, oldest first."""
        return [self._events.popleft() for _ in range(len(self._events))]
