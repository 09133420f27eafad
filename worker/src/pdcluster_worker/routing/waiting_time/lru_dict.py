"""A small map that forgets what was used least recently, because clients choose how many groups
there are.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class LruDict(Generic[ValueT]):
    """At most `most` values by name."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[str, ValueT] = OrderedDict()

    def get(self, name: str, default: ValueT) -> ValueT:
        """The value, which is used now; the default where there is none."""
        if name not in self._values:
            return default
        self._values.move_to_end(name)
        return self._values[name]

    def put(self, name: str, value: ValueT) -> None:
        """Keep a value; the one used least recently goes when there are too many."""
        self._values[name] = value
        self._values.move_to_end(name)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
