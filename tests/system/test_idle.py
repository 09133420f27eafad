"""A worker with nothing to do does nothing: no thread of its two processes spins."""

import time

import psutil

from tests.system.cluster import Pair
from tests.system.worker_process import WorkerProcess

WINDOW_SECONDS = 5.0
MAX_SHARE = 0.10
"""Share of one core; a spinning thread shows as 1.0.

The figure that we publish is measured on a quiet machine.
"""


def cpu_seconds(worker: WorkerProcess) -> float:
    """CPU time of both processes so far."""
    times = [psutil.Process(pid).cpu_times() for pid in (worker.process.pid, worker.engine_pid)]
    return sum(t.user + t.system for t in times)


def test_idle_workers_use_little_cpu(pair: Pair) -> None:
    pair.cluster.wait_settled()
    before = {worker: cpu_seconds(worker) for worker in (pair.prefill, pair.decode)}

    time.sleep(WINDOW_SECONDS)  # the window that is measured, not a wait for something

    for worker, used in before.items():
        assert cpu_seconds(worker) - used < MAX_SHARE * WINDOW_SECONDS
