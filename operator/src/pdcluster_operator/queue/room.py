"""Room for another reconcile beside one that is in work.

There is none while objects are written: then the API server has all the requests that it is to
have at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Room:
    """Shared by the reconciles and the runner that begins them.

    on_free: called when nothing takes it any more
    """

    on_free: Callable[[], None] | None = None
    _num_taken: int = 0

    @property
    def is_free(self) -> bool:
        """Return whether another reconcile may begin beside one."""
        return not self._num_taken

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take it while objects are written."""
        self._num_taken += 1
        try:
            yield
        finally:
            self._num_taken -= 1
            if self.is_free and self.on_free is not None:
                self.on_free()
