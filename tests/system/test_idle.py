"""A worker with nothing to do does nothing: no thread of its two processes spins."""

import time

from tests.system.idle import MAX_SHARE, cpu_seconds

WINDOW_SECONDS = 5.0


def test_idle_workers_use_little_cpu(pair):
    pair.cluster.wait_settled()
    before = {worker: cpu_seconds(worker) for worker in (pair.prefill, pair.decode)}

    time.sleep(WINDOW_SECONDS)  # the window that is measured, not a wait for something

    for worker, used in before.items():
        assert cpu_seconds(worker) - used < MAX_SHARE * WINDOW_SECONDS
