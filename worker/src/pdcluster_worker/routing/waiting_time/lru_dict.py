"""A bounded LRU map, because clients choose how many groups there are."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class LruDict(Generic[ValueT]):
    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[str, ValueT] = OrderedDict()

    def get(self, name: str, default: ValueT) -> ValueT:
        if name not in self._values:
            return default
        self._values.move_to_end(name)
        return self._values[name]

    def put(self, name: str, value: ValueT) -> None:
        self._values[name] = value
        self._values.move_to_end(name)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
