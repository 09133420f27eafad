"""Cores of this worker: lent between engines of one machine, and whether threads spin on them.

Idle engines lend their cores to busy ones through a shared file, without a lock: a busy engine
clears its idle flag, lowers the others' numbers of threads, which their kernels read after each
layer, and recomputes its own until no flag changes.

A join costs 60 us asleep, 2 to 4 us spinning, and steps have hundreds.  Spinning on shared cores
made two workers 3 to 9 times slower, so threads spin only on cores of their own.
"""

import ctypes
import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from pdcluster_worker.errors import ConfigError
from pdcluster_worker.system.cgroups import available_threads, process_limits, process_request

VARIABLE = "PDCLUSTER_SHARED_CORES"  # environment variable: a `CoreShare` as JSON
OWN_CORES = "PDCLUSTER_OWN_CORES"  # environment variable: cores reserved for this worker

SPIN_COUNT = 20_000  # spins before a thread sleeps, about 0.9 ms; 5,000 were too few on one CPU
MOST_SPINS = 1 << 32  # about three minutes

Count = Annotated[int, msgspec.Meta(ge=1, le=8192)]  # of threads or cores: no machine has more

SLOT = 64
_RESTS, _THREADS = 0, 1  # int32 fields of an entry; a new file says that all are busy


class CoreShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    place: int  # index of this engine in `threads`
    threads: tuple[Count, ...]  # of each engine
    cores: Count  # of all engines


def core_share(environment: Mapping[str, str]) -> CoreShare | None:
    """None where the starter gave none.  Raises ConfigError."""
    value = environment.get(VARIABLE)
    if not value:
        return None
    try:
        share = msgspec.json.decode(value, type=CoreShare)
    except ValueError as e:  # of msgspec, or of invalid UTF-8
        raise _wrong(str(e)) from e
    threads = list(share.threads)
    if not 0 <= share.place < len(threads):
        raise _wrong(f"place {share.place} of threads {threads} must be one of them")
    if sum(threads) > share.cores:
        raise _wrong(f"threads {threads} are more than its {share.cores} cores")
    return share


def _wrong(reason: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}: {reason}; `pdctl up` writes it, so leave it out")


def allotted(place: int, threads: Sequence[int], rests: Sequence[bool], cores: int) -> int:
    """Threads of the busy engine at `place`: its own, and its part of the spare cores.

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
    """One engine's view of the file, initially busy.  Raises ConfigError."""

    def __init__(self, share: CoreShare) -> None:
        self._share = share
        self._memory = _opened(share.path, SLOT * len(share.threads))
        self._slots = [
            (ctypes.c_int32 * 2).from_buffer(self._memory, SLOT * at)
            for at in range(len(share.threads))
        ]
        self._own = self._slots[share.place]
        self.take()

    @property
    def address(self) -> int:
        """Address of this engine's number of threads, an int32 that other engines lower."""
        return ctypes.addressof(self._own) + ctypes.sizeof(ctypes.c_int32) * _THREADS

    @property
    def own(self) -> int:
        """Threads that it never lends while busy."""
        return self._share.threads[self._share.place]

    @property
    def most(self) -> int:
        """Threads that it can ever use."""
        return allotted(
            self._share.place, self._share.threads, [True] * len(self._slots), self._share.cores
        )

    def take(self) -> int:
        """Be busy, and return the number of threads.  Called at the start of each step."""
        begins = self._own[_RESTS] == 1
        self._own[_RESTS] = 0
        rests = self._rests()
        if begins:
            for other, slot in enumerate(self._slots):
                if not rests[other] and other != self._share.place:
                    slot[_THREADS] = self._allotted(other, rests)
        seen = None
        while seen != rests:  # one that became busy meanwhile may have lowered it before
            self._own[_THREADS] = self._allotted(self._share.place, rests)
            seen, rests = rests, self._rests()
        return self._own[_THREADS]

    def rest(self) -> None:
        """Lend the cores until the next `take`."""
        self._own[_RESTS] = 1

    def _rests(self) -> list[bool]:
        return [slot[_RESTS] == 1 for slot in self._slots]

    def _allotted(self, place: int, rests: list[bool]) -> int:
        return allotted(place, self._share.threads, rests, self._share.cores)


def open_cores(environment: Mapping[str, str]) -> SharedCores | None:
    """None where the starter gave no share.  Raises ConfigError."""
    share = core_share(environment)
    return None if share is None else SharedCores(share)


def _opened(path: str, size: int) -> mmap.mmap:
    """Creates the file; one with other content is refused."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except (OSError, ValueError) as e:  # ValueError: an impossible file name
        raise _wrong(f"cannot open {path!r}: {e}") from e
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size not in (0, size):
            raise _wrong(f"{path!r} is no file of {size} bytes for {size // SLOT} engines")
        os.ftruncate(file, size)
        return mmap.mmap(file, size)
    except OSError as e:
        raise _wrong(f"cannot write {path!r}: {e}") from e
    finally:
        os.close(file)


def wait_environment(
    threads: int, environment: Mapping[str, str], engines: int = 1
) -> dict[str, str]:
    """OpenMP's variables to add to `environment`, whose own values win; read as torch is imported.

    threads: 0 = from the machine.
    """
    own = own_cores(environment, process_limits(), process_request()) / engines
    needed = {"OMP_WAIT_POLICY": "PASSIVE"}
    # Lent threads have a core each, as long as they are lent.
    if environment.get(VARIABLE) or spins(threads or available_threads(), own):
        needed["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return {name: value for name, value in needed.items() if name not in environment}


def spins_of(environment: Mapping[str, str]) -> int:
    """Spins of our own kernels, from libgomp's variables.

    >>> spins_of({"GOMP_SPINCOUNT": "300"}), spins_of({"OMP_WAIT_POLICY": "passive"}), spins_of({})
    (300, 0, 20000)
    """
    value = environment.get("GOMP_SPINCOUNT", "")
    if value.isascii() and value.isdigit():
        return min(int(value), MOST_SPINS)
    is_passive = environment.get("OMP_WAIT_POLICY", "").strip().upper() == "PASSIVE"
    return 0 if is_passive and not value else SPIN_COUNT


def own_cores(environment: Mapping[str, str], limits: list[float], request: float) -> float:
    """By its starter, else what its container requests, up to the limit."""
    value = environment.get(OWN_CORES, "")
    if value.isdigit():
        return float(value)
    return min([*limits, request])


def spins(threads: int, own: float) -> bool:
    """Return whether several threads have a core each."""
    return 1 < threads <= own
