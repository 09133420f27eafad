"""Gate that another reconcile passes to begin beside one that is in work.

It is closed while objects are written: then the API server has all the requests that it is to
have at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class WriteGate:
    """Shared by the reconciles and the runner that begins them.

    on_open: called when no write closes it any more
    """

    on_open: Callable[[], None] | None = None
    _num_writing: int = 0

    @property
    def is_open(self) -> bool:
        """Return whether another reconcile may begin beside one."""
        return not self._num_writing

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Keep it closed while objects are written."""
        self._num_writing += 1
        try:
            yield
        finally:
            self._num_writing -= 1
            if self.is_open and self.on_open is not None:
                self.on_open()
