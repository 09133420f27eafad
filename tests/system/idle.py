"""CPU of workers with nothing to do."""

import psutil

from tests.system.worker_process import WorkerProcess

MAX_SHARE = 0.10
"""Share of one core; a spinning thread shows as 1.0.

The figure that we publish is measured on a quiet machine.
"""


def cpu_seconds(worker: WorkerProcess) -> float:
    """CPU time of both processes so far."""
    times = [psutil.Process(pid).cpu_times() for pid in (worker.process.pid, worker.engine_pid)]
    return sum(t.user + t.system for t in times)
