"""Simulated time: a queue of calls, and machines whose cores the steps of engines share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Protocol


class SimulatedTime:
    """Calls in the order of their time; those of one time in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = count()

    def at(self, time: float, call: Callable[[Any], None], argument: Any = None) -> None:
        heappush(self._events, (time, next(self._numbers), call, argument))

    def run(self, until: float) -> None:
        """Make every call up to that time, those that others add among them."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, call, argument = heappop(events)
            call(argument)
        self.now = max(self.now, until)


@dataclass(slots=True, eq=False)
class Work:
    """Seconds of computing, as if nothing else used its machine.  begin, end: of the machine's own
    clock, `Machine.elapsed`.
    """

    on_end: Callable[[], None]
    begin: float
    end: float
    is_over: bool = False


class Machine(Protocol):
    """The cores or the accelerators that compute the steps of one engine or more."""

    def start(self, seconds: float, on_end: Callable[[], None]) -> Work:
        """Compute for that long from now on."""

    def elapsed(self, work: Work) -> float:
        """Seconds of it that are done."""

    def cut(self, work: Work, seconds: float) -> None:
        """Let it end after that many seconds, which are not done yet."""


class OwnMachine:
    """A machine of one engine alone."""

    def __init__(self, queue: SimulatedTime) -> None:
        self._queue = queue

    def start(self, seconds: float, on_end: Callable[[], None]) -> Work:
        now = self._queue.now
        work = Work(on_end, now, now + seconds)
        self._queue.at(work.end, self._end, (work, work.end))
        return work

    def elapsed(self, work: Work) -> float:
        return self._queue.now - work.begin

    def cut(self, work: Work, seconds: float) -> None:
        work.end = max(self._queue.now, work.begin + seconds)
        self._queue.at(work.end, self._end, (work, work.end))

    def _end(self, due: tuple[Work, float]) -> None:
        work, end = due
        if not work.is_over and work.end == end:
            work.is_over = True
            work.on_end()


class SharedMachine:
    """A machine of several engines.

    rates: speed of each while 1, 2, ... of them compute; with more, the last rate is divided
    """

    def __init__(self, queue: SimulatedTime, rates: Sequence[float]) -> None:
        self._queue = queue
        self._rates = tuple(rates)
        self._clock = 0.0  # grows by the rate
        self._since = 0.0
        self._rate = 1.0
        self._works: list[tuple[float, int, Work]] = []
        self._numbers = count()
        self._version = 0

    def start(self, seconds: float, on_end: Callable[[], None]) -> Work:
        self._advance()
        work = Work(on_end, self._clock, self._clock + seconds)
        heappush(self._works, (work.end, next(self._numbers), work))
        self._renew()
        return work

    def elapsed(self, work: Work) -> float:
        self._advance()
        return self._clock - work.begin

    def cut(self, work: Work, seconds: float) -> None:
        self._advance()
        work.end = max(self._clock, work.begin + seconds)
        self._works = [
            (each.end, number, each) if each is work else (end, number, each)
            for end, number, each in self._works
        ]
        heapify(self._works)
        self._renew()

    def _advance(self) -> None:
        now = self._queue.now
        if self._works:
            self._clock += (now - self._since) * self._rate
        self._since = now

    def _renew(self) -> None:
        """Set the speed by the number of works, and wait for the first of them to end."""
        self._version += 1
        if not self._works:
            return
        number, rates = len(self._works), self._rates
        self._rate = rates[number - 1] if number <= len(rates) else rates[-1] * len(rates) / number
        left = max(0.0, self._works[0][0] - self._clock) / self._rate
        self._queue.at(self._queue.now + left, self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        end, _, work = heappop(self._works)
        self._clock = max(self._clock, end)
        work.is_over = True
        self._renew()
        work.on_end()
