"""Requests of one worker for estimates: running ones, and totals of the waiting ones in order.

Totals are kept by chunk, so each operation costs the square root of the queue's length.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from pdcluster_worker.routing.estimator import QueuedRequest, QueueState

MOST = 128  # requests of a chunk

_Key = tuple[int, float, int]  # priority, deadline, serial number


@dataclass(slots=True)
class QueueAhead:
    """alike: (requests, sum of max_tokens) by group and bit length of max_tokens."""

    num_requests: int = 0
    prompt_tokens: int = 0
    alike: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def count(self, request: QueuedRequest, sign: int = 1) -> None:
        """sign: -1 removes it."""
        self.num_requests += sign
        self.prompt_tokens += sign * request.prompt_tokens
        self._add((request.group, request.max_tokens.bit_length()), sign, sign * request.max_tokens)

    def add(self, other: "QueueAhead") -> None:
        self.num_requests += other.num_requests
        self.prompt_tokens += other.prompt_tokens
        for kind, (number, tokens) in other.alike.items():
            self._add(kind, number, tokens)

    def _add(self, kind: tuple[str, int], number: int, tokens: int) -> None:
        old_number, old_tokens = self.alike.get(kind, (0, 0))
        if old_number + number:
            self.alike[kind] = old_number + number, old_tokens + tokens
        else:
            self.alike.pop(kind, None)


class _QueueChunk:
    def __init__(self, keys: list[_Key], requests: list[QueuedRequest]) -> None:
        self.keys, self.requests = keys, requests
        self.totals = QueueAhead()
        for request in requests:
            self.totals.count(request)

    def insert(self, key: _Key, request: QueuedRequest) -> None:
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.requests.insert(at, request)
        self.totals.count(request)

    def remove(self, key: _Key) -> None:
        at = bisect_left(self.keys, key)
        del self.keys[at]
        self.totals.count(self.requests.pop(at), -1)

    def half(self) -> "_QueueChunk":
        """Split off the second half."""
        middle = len(self.keys) // 2
        rest = _QueueChunk(self.keys[middle:], self.requests[middle:])
        del self.keys[middle:]
        del self.requests[middle:]
        for request in rest.requests:
            self.totals.count(request, -1)
        return rest


class RequestQueue(Collection[QueuedRequest]):
    def __init__(self, requests: Iterable[QueuedRequest] = ()) -> None:
        self.running: dict[QueuedRequest, None] = {}
        self.by_group: Counter[str] = Counter()
        self._chunks: list[_QueueChunk] = []
        self._keys: dict[QueuedRequest, _Key] = {}
        self._serial = 0
        for request in requests:
            self.add(request)

    def add(self, request: QueuedRequest) -> None:
        self.by_group[request.group] += 1
        if request.is_decoding:
            self.running[request] = None
            return
        self._serial += 1
        key = self._keys[request] = request.priority, request.due_seconds, self._serial
        if not self._chunks:
            self._chunks.append(_QueueChunk([key], [request]))
            return
        at = min(self._chunk_of(key), len(self._chunks) - 1)
        self._chunks[at].insert(key, request)
        if len(self._chunks[at].keys) > MOST:
            self._chunks.insert(at + 1, self._chunks[at].half())

    def began(self, request: QueuedRequest) -> None:
        self._leave(request)
        self.running[request] = None

    def remove(self, request: QueuedRequest) -> None:
        self.by_group[request.group] -= 1
        if not self.by_group[request.group]:
            del self.by_group[request.group]  # clients choose deadlines, and so groups
        self._leave(request)
        self.running.pop(request, None)

    def ahead(self, request: QueuedRequest) -> QueueAhead:
        """Totals of waiting requests that are served before a new one."""
        place, found = (request.priority, request.due_seconds), QueueAhead()
        for chunk in self._chunks:
            if chunk.keys[-1][:2] <= place:
                found.add(chunk.totals)
                continue
            for key, other in zip(chunk.keys, chunk.requests, strict=True):
                if key[:2] > place:
                    return found
                found.count(other)
        return found

    def __iter__(self) -> Iterator[QueuedRequest]:
        yield from self.running
        for chunk in self._chunks:
            yield from chunk.requests

    def __len__(self) -> int:
        return len(self.running) + len(self._keys)

    def __contains__(self, request: object) -> bool:
        return request in self.running or request in self._keys

    def _leave(self, request: QueuedRequest) -> None:
        key = self._keys.pop(request, None)
        if key is None:
            return
        at = self._chunk_of(key)
        self._chunks[at].remove(key)
        if not self._chunks[at].keys:
            del self._chunks[at]

    def _chunk_of(self, key: _Key) -> int:
        return bisect_left(self._chunks, key, key=lambda chunk: chunk.keys[-1])


def queue_of(queue: QueueState) -> RequestQueue:
    return (
        queue.requests if isinstance(queue.requests, RequestQueue) else RequestQueue(queue.requests)
    )
