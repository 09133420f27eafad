"""Cores of one machine that its engines lend each other while they have nothing to compute.

`pdctl` divides the machine: each engine has threads of its own.  An engine that
rests leaves its cores to those that work, and takes them back with its next step.
All read and write one small file: a line of 64 bytes for each engine, with a flag
(it rests) and the number of threads that it may use.  There is no lock: an engine
computes its own number before each step, and lowers that of others when it begins
to work, which the kernels see after each layer.  Two that begin in the same moment may
share cores for one step.

Has no torch.  The cores of an engine that was killed while it worked are lent to no other.
"""

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence

import msgspec

from pdcluster_worker.errors import ConfigError

VARIABLE = "PDCLUSTER_SHARED_CORES"
"""Environment variable: a `CorePlace` as JSON."""

LINE = 64
_RESTS, _THREADS = 0, 1
"""Fields of an engine's line, each an int32; a new file says that all work."""


class CorePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine's place among those that share cores.

    path: of the file.  place: of this engine in `threads`, which are each engine's own.
    cores: of all of them together.
    """

    path: str
    place: int
    threads: tuple[int, ...]
    cores: int


def core_place(environment: Mapping[str, str]) -> CorePlace | None:
    """The place that the starter gave this engine, if any.  Raises ConfigError."""
    said = environment.get(VARIABLE)
    if not said:
        return None
    try:
        place = msgspec.json.decode(said, type=CorePlace)
    except msgspec.MsgspecError as e:
        raise ConfigError(f"{VARIABLE}: {e}; `pdctl up` writes it, so leave it out") from e
    if not 0 <= place.place < len(place.threads) or min(place.threads) < 1:
        raise ConfigError(
            f"{VARIABLE}: place {place.place} of threads {list(place.threads)}: it must be one of "
            "them, and each at least 1; `pdctl up` writes it, so leave it out"
        )
    return place


def allotted(place: int, threads: Sequence[int], rests: Sequence[bool], cores: int) -> int:
    """Threads for the engine at `place`, which works.

    Its own, and its part of the cores that no engine uses: they go to the engines that
    work, one after another.

    >>> allotted(0, [1, 1], [False, True], 2), allotted(0, [1, 1], [False, False], 2)
    (2, 1)
    >>> [allotted(place, [1, 1, 2], [False, False, True], 5) for place in (0, 1)]
    [3, 2]
    """
    works = [other for other in range(len(threads)) if other == place or not rests[other]]
    spare = max(0, cores - sum(threads[other] for other in works))
    each, left = divmod(spare, len(works))
    return threads[place] + each + (works.index(place) < left)


class SharedCores:
    """One engine's end of the file.  It works until it says that it rests."""

    def __init__(self, place: CorePlace) -> None:
        self._place = place
        size = LINE * len(place.threads)
        try:
            file = os.open(place.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise ConfigError(f"{VARIABLE}: cannot open {place.path}: {e.strerror}") from e
        try:
            os.ftruncate(file, size)
            self._memory = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._lines = [
            (ctypes.c_int32 * 2).from_buffer(self._memory, LINE * at)
            for at in range(len(place.threads))
        ]
        self._own = self._lines[place.place]
        self._own[_RESTS] = 0
        self.take()

    @property
    def address(self) -> int:
        """Address of this engine's number of threads, an int32 that other engines lower."""
        return ctypes.addressof(self._own) + ctypes.sizeof(ctypes.c_int32) * _THREADS

    @property
    def most(self) -> int:
        """Threads that this engine can ever use."""
        return allotted(
            self._place.place, self._place.threads, [True] * len(self._lines), self._place.cores
        )

    def take(self) -> int:
        """Work from now on; returns with how many threads.  For the start of each step."""
        begins = self._own[_RESTS] == 1
        self._own[_RESTS] = 0
        rests = [line[_RESTS] == 1 for line in self._lines]
        if begins:
            for other, line in enumerate(self._lines):
                if not rests[other] and other != self._place.place:
                    line[_THREADS] = self._allotted(other, rests)
        self._own[_THREADS] = self._allotted(self._place.place, rests)
        return self._own[_THREADS]

    def rest(self) -> None:
        """Leave the cores to engines that work, until the next `take`."""
        self._own[_RESTS] = 1

    def _allotted(self, place: int, rests: list[bool]) -> int:
        return allotted(place, self._place.threads, rests, self._place.cores)
