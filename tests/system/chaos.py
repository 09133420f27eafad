"""Workers that come and go while a trace runs, at seeded moments: killed, drained, ended, added.

One step after the other.  Before a step takes a decode worker away the router knows two that are
ready, so that one is left; a prefill worker may be the last.
"""

import time
from collections import Counter
from collections.abc import Callable
from random import Random

import httpx

from tests.system.client import Json
from tests.system.cluster import Cluster
from tests.system.waiting import wait_for
from tests.system.worker_process import READY_SECONDS, SETTLE_SECONDS, WorkerProcess

Step = Callable[[], None]


class Chaos:
    """Changes one cluster.

    num_steps: those that are done, by name; drain_seconds: of each drain by command
    router: that the trace goes over; it stays
    policy: of the workers that are added
    """

    def __init__(self, cluster: Cluster, router: WorkerProcess, policy: Json, seed: str) -> None:
        self.num_steps: Counter[str] = Counter()
        self.drain_seconds: list[float] = []
        self._cluster = cluster
        self._router = router
        self._policy = policy
        self._random = Random(f"chaos {seed}")
        self._num_added = 0

    def steps(self) -> list[Step]:
        """Each kind of change once, in a random order."""
        steps: list[Step] = [self.add]
        for role in ("prefill", "decode"):
            steps += [self._step(change, role) for change in (self.kill, self.drain, self.end)]
        self._random.shuffle(steps)
        return steps

    # --- changes ------------------------------------------------------------------------------

    def kill(self, role: str) -> None:
        """SIGKILL a worker and start it again; returns when the cluster knows that it is another
        one.
        """
        victim = self._victim(role)
        victim.kill()
        self._start_again(victim)

    def end(self, role: str) -> None:
        """SIGTERM: it drains and ends well; then it starts again."""
        victim = self._victim(role)
        victim.terminate()
        assert victim.wait_end() == 0, victim.log_tail()
        self._start_again(victim)

    def drain(self, role: str) -> None:
        victim, began = self._victim(role), time.monotonic()
        with self._cluster.drained_by_command(victim.name):
            self._cluster.wait_state(victim.name, "drained")
            self.drain_seconds.append(time.monotonic() - began)

    def add(self) -> None:
        """Start a decode worker that was not there; it serves when it is ready."""
        worker = self._cluster.add_worker("decode", f"decode-added-{self._num_added}", start=False)
        worker.write_policy(self._policy)
        worker.start()
        self._num_added += 1
        self.num_steps["add decode"] += 1

    def all_ready(self) -> None:
        """Wait until every worker is ready, and the router knows it."""
        self._cluster.wait_ready()
        num_decodes = len(self._ready("decode"))
        wait_for(
            lambda: self._num_known("decode") == num_decodes,
            READY_SECONDS,
            f"{self._router.name} knows {num_decodes} decode workers",
        )

    # --- choice of victims and times
    # ------------------------------------------------------------------------

    def _step(self, change: Callable[[str], None], role: str) -> Step:
        def step() -> None:
            change(role)
            self.num_steps[f"{change.__name__} {role}"] += 1

        return step

    def _victim(self, role: str) -> WorkerProcess:
        num_needed = 2 if role == "decode" else 1

        def is_enough() -> bool:
            return len(self._ready(role)) >= num_needed and self._num_known(role) == len(
                self._ready(role)
            )

        wait_for(
            is_enough,
            READY_SECONDS,
            lambda: f"{self._router.name} knows {self._num_known(role)} {role} workers",
        )
        victim = self._random.choice(self._ready(role))
        victim.wait_ready()  # it is; this takes note of its engine
        return victim

    def _ready(self, role: str) -> list[WorkerProcess]:
        """Workers that say so themselves."""
        workers = [
            worker
            for worker in self._cluster.workers.values()
            if worker.settings["role"] == role and worker.is_alive
        ]
        return [worker for worker in workers if _is_ready(self._cluster.record(worker.name))]

    def _num_known(self, role: str) -> int:
        """Ready ones by the router; a router knows decode workers only."""
        if role == "prefill":
            return len(self._ready(role))
        return int(self._router.metrics().value("peers", role=role, state="ready"))

    def _start_again(self, worker: WorkerProcess) -> None:
        old = worker.record["engine_id"]
        worker.restart(wait=False)

        def is_another() -> bool:
            record = self._cluster.record(worker.name)
            return record is None or record["engine_id"] != old

        wait_for(is_another, SETTLE_SECONDS, f"the record of {worker.name} is another one")


def _is_ready(record: Json | None) -> bool:
    if record is None or not record["http_address"]:
        return False
    try:
        return (
            httpx.get(f"http://{record['http_address']}/ready", trust_env=False).status_code
            == httpx.codes.OK
        )
    except httpx.TransportError:
        return False
