"""The requests of one worker as estimates need them: running ones, and totals of those that wait,
in the order of service.

The order is the engine's: priority, then the earliest deadline (EDF), then arrival.  Totals are
kept for chunks of it, so a request that comes or goes, and a look at those ahead, cost the square
root of the line and not the line.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from pdcluster_worker.routing.estimator import Flight, Line

MOST = 128
"""Requests of a chunk."""

_Key = tuple[int, float, int]
"""Priority, seconds of the deadline, serial number."""


@dataclass(slots=True)
class Ahead:
    """Totals of requests that wait.

    alike: (requests, sum of max_tokens) by group and the number of binary digits of max_tokens.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    alike: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def count(self, flight: Flight, sign: int = 1) -> None:
        """Add a request, or take it off again (-1)."""
        self.num_requests += sign
        self.prompt_tokens += sign * flight.prompt_tokens
        self._add((flight.group, flight.max_tokens.bit_length()), sign, sign * flight.max_tokens)

    def add(self, other: "Ahead") -> None:
        """Add other totals."""
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


class _Chunk:
    """Some that follow each other."""

    def __init__(self, keys: list[_Key], flights: list[Flight]) -> None:
        self.keys, self.flights = keys, flights
        self.totals = Ahead()
        for flight in flights:
            self.totals.count(flight)

    def insert(self, key: _Key, flight: Flight) -> None:
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.flights.insert(at, flight)
        self.totals.count(flight)

    def remove(self, key: _Key) -> None:
        at = bisect_left(self.keys, key)
        del self.keys[at]
        self.totals.count(self.flights.pop(at), -1)

    def half(self) -> "_Chunk":
        """The second half, which leaves this one."""
        middle = len(self.keys) // 2
        rest = _Chunk(self.keys[middle:], self.flights[middle:])
        del self.keys[middle:]
        del self.flights[middle:]
        for flight in rest.flights:
            self.totals.count(flight, -1)
        return rest


class Flights(Collection[Flight]):
    """Requests from their arrival to their last token.  running: past their first token."""

    def __init__(self, flights: Iterable[Flight] = ()) -> None:
        self.running: dict[Flight, None] = {}
        self.by_group: Counter[str] = Counter()
        self._chunks: list[_Chunk] = []
        self._keys: dict[Flight, _Key] = {}
        self._serial = 0
        for flight in flights:
            self.add(flight)

    def add(self, flight: Flight) -> None:
        """One more."""
        self.by_group[flight.group] += 1
        if flight.is_decoding:
            self.running[flight] = None
            return
        self._serial += 1
        key = self._keys[flight] = flight.priority, flight.due_seconds, self._serial
        if not self._chunks:
            self._chunks.append(_Chunk([key], [flight]))
            return
        at = min(self._chunk_of(key), len(self._chunks) - 1)
        self._chunks[at].insert(key, flight)
        if len(self._chunks[at].keys) > MOST:
            self._chunks.insert(at + 1, self._chunks[at].half())

    def began(self, flight: Flight) -> None:
        """Take its first token."""
        self._leave(flight)
        self.running[flight] = None

    def remove(self, flight: Flight) -> None:
        """Remove it, with or without a first token."""
        self.by_group[flight.group] -= 1
        if not self.by_group[flight.group]:
            del self.by_group[flight.group]  # clients choose deadlines, and so groups
        self._leave(flight)
        self.running.pop(flight, None)

    def ahead(self, flight: Flight) -> Ahead:
        """Totals of those that are served before one which comes now."""
        place, found = (flight.priority, flight.due_seconds), Ahead()
        for chunk in self._chunks:
            if chunk.keys[-1][:2] <= place:
                found.add(chunk.totals)
                continue
            for key, other in zip(chunk.keys, chunk.flights, strict=True):
                if key[:2] > place:
                    return found
                found.count(other)
        return found

    def __iter__(self) -> Iterator[Flight]:
        yield from self.running
        for chunk in self._chunks:
            yield from chunk.flights

    def __len__(self) -> int:
        return len(self.running) + len(self._keys)

    def __contains__(self, flight: object) -> bool:
        return flight in self.running or flight in self._keys

    def _leave(self, flight: Flight) -> None:
        key = self._keys.pop(flight, None)
        if key is None:
            return
        at = self._chunk_of(key)
        self._chunks[at].remove(key)
        if not self._chunks[at].keys:
            del self._chunks[at]

    def _chunk_of(self, key: _Key) -> int:
        return bisect_left(self._chunks, key, key=lambda chunk: chunk.keys[-1])


def flights_of(line: Line) -> Flights:
    """The requests of a line, with totals."""
    return line.flights if isinstance(line.flights, Flights) else Flights(line.flights)
