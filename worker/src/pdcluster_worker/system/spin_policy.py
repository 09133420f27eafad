"""Choose how the model's threads wait for one another: asleep, or spinning for a moment where the
cores are theirs alone.

An OpenMP team joins hundreds of times in a step.  Asleep, each join costs 60 us;
spinning costs 2 to 4 us.  But a thread that spins on a core that another worker
needs holds that one up: two workers of two threads each on the same two cores
ran 3 to 9 times slower.  So threads spin only where nothing else is to run on
their cores: `pdctl` divides the machine and says so, and a container owns what it
requests, up to its limit.  Has no torch: OpenMP reads this before torch is imported.
"""

from collections.abc import Mapping

from pdcluster_worker.system.cpu_limit import available_threads, process_limits
from pdcluster_worker.system.cpu_request import process_request
from pdcluster_worker.system.shared_cores import VARIABLE as SHARED_CORES

OWN_CORES = "PDCLUSTER_OWN_CORES"
"""Environment variable: cores on which nothing but this worker is to run."""

SPIN_COUNT = 20_000
"""Turns of a spin before a thread sleeps, about 0.9 ms: 5,000 were too few on one CPU, and it
bounds what a spin can take.
"""

MOST_SPINS = 1 << 32
"""About three minutes."""


def wait_environment(
    threads: int, environment: Mapping[str, str], engines: int = 1
) -> dict[str, str]:
    """Environment of an engine process beyond `environment`, whose own values win.

    threads: of the model in this process; 0 = from the machine.
    engines: of the worker, which share its cores evenly.
    """
    own = own_cores(environment, process_limits(), process_request()) / engines
    needed = {"OMP_WAIT_POLICY": "PASSIVE"}
    # Lent threads have a core each, as long as they are lent.
    if environment.get(SHARED_CORES) or spins(threads or available_threads(), own):
        needed["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return {name: value for name, value in needed.items() if name not in environment}


def spins_of(environment: Mapping[str, str]) -> int:
    """Turns of a spin in the waits of our own kernels: as libgomp reads them for its own.

    >>> spins_of({"GOMP_SPINCOUNT": "300"}), spins_of({"OMP_WAIT_POLICY": "passive"}), spins_of({})
    (300, 0, 20000)
    """
    value = environment.get("GOMP_SPINCOUNT", "")
    if value.isascii() and value.isdigit():
        return min(int(value), MOST_SPINS)
    is_passive = environment.get("OMP_WAIT_POLICY", "").strip().upper() == "PASSIVE"
    return 0 if is_passive and not value else SPIN_COUNT


def own_cores(environment: Mapping[str, str], limits: list[float], request: float) -> float:
    """Cores that are this worker's alone: what its starter says, else what its container requests,
    up to the limit.
    """
    value = environment.get(OWN_CORES, "")
    if value.isdigit():
        return float(value)
    return min([*limits, request])


def spins(threads: int, own: float) -> bool:
    """Return whether several threads have a core of their own each."""
    return 1 < threads <= own
