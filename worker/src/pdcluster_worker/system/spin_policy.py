"""Choose spinning or sleeping at barriers; OpenMP reads it when torch is imported.

A join costs 60 us asleep, 2 to 4 us spinning, and steps have hundreds.  Spinning on shared cores
made two workers 3 to 9 times slower, so threads spin only on cores of their own.
"""

from collections.abc import Mapping

from pdcluster_worker.system.cpu_limit import available_threads, process_limits
from pdcluster_worker.system.cpu_request import process_request
from pdcluster_worker.system.shared_cores import VARIABLE as SHARED_CORES

OWN_CORES = "PDCLUSTER_OWN_CORES"  # environment variable: cores reserved for this worker

SPIN_COUNT = 20_000  # spins before a thread sleeps, about 0.9 ms; 5,000 were too few on one CPU

MOST_SPINS = 1 << 32  # about three minutes


def wait_environment(
    threads: int, environment: Mapping[str, str], engines: int = 1
) -> dict[str, str]:
    """Variables to add to `environment`, whose own values win.  threads: 0 = from the machine."""
    own = own_cores(environment, process_limits(), process_request()) / engines
    needed = {"OMP_WAIT_POLICY": "PASSIVE"}
    # Lent threads have a core each, as long as they are lent.
    if environment.get(SHARED_CORES) or spins(threads or available_threads(), own):
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
