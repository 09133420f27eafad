"""A random walk over sizes, requests, evictions, workers that read commands late, and an etcd that
goes away or comes back empty.

Checked at every step: no pod is removed while it has a request or may get one, unless it is
evicted; replicas never fall below what is wanted; while any worker is wanted not all that serve
have drain commands; and those that end with little time, and they alone, have a command with it.
At the end all requests end, etcd answers and all workers read their commands: then the pool has the
wanted size, no worker that stays has a drain command, and planning again changes nothing.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pdcluster_api.plan.drain.draining import DrainPlan, plan_drain
from pdcluster_api.plan.observed.state import WorkerRecords
from pdcluster_schema.workload import Workload
from tests.operator.pdcluster_api.plan.clusters import identity, workload
from tests.operator.pods import pod_state

OF = identity("r1")
MAX_WORKERS = 3
ORDINALS = st.integers(0, MAX_WORKERS - 1)


@dataclass
class ModelledWorker:
    """State of a worker.

    is_ready: it takes requests, unless it has a drain command; is_probed: its pod's readiness at
              the kubelet's last probe
    is_told:  command that it has read; record: its record in etcd, None = none
    ends:     it was evicted; grace: with so little time, None = with the usual
    """

    is_ready: bool = False
    is_probed: bool = False
    is_told: bool = False
    num_requests: int = 0
    record: str | None = None
    ends: bool = False
    grace: int | None = None

    @property
    def state(self) -> str:
        return "ready" if not self.is_told else "draining" if self.num_requests else "drained"


class DrainMachine(RuleBasedStateMachine):
    """One StatefulSet, its workers, and the etcd between them and the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.desired, self.replicas = 2, 2
        self.workers = {
            ordinal: ModelledWorker(is_ready=True, is_probed=True, record="ready")
            for ordinal in range(2)
        }
        self.commands: set[str] = set()
        self.is_etcd_away = False

    # Clients, and workers.

    @rule(desired=st.integers(0, MAX_WORKERS))
    def scale(self, desired: int) -> None:
        self.desired = desired

    @rule(ordinal=ORDINALS)
    def a_request_comes(self, ordinal: int) -> None:
        worker = self.workers.get(ordinal)
        if worker is not None and worker.is_ready and not worker.is_told:
            worker.num_requests += 1

    @rule(ordinal=ORDINALS)
    def a_request_ends(self, ordinal: int) -> None:
        worker = self.workers.get(ordinal)
        if worker is not None and worker.num_requests:
            worker.num_requests -= 1

    @rule(ordinal=ORDINALS)
    def a_worker_gets_ready(self, ordinal: int) -> None:
        """It has registered before it is ready, and knows its command."""
        if ordinal in self.workers and not self.is_etcd_away:
            self.hear(ordinal)
            self.workers[ordinal].is_ready = True

    @rule(ordinal=ORDINALS, is_probed=st.booleans())
    def a_worker_hears(self, ordinal: int, is_probed: bool) -> None:
        """And its kubelet asks, sooner or later: a worker that drains says that it is not ready."""
        worker = self.workers.get(ordinal)
        if worker is not None and worker.is_ready and not self.is_etcd_away:
            self.hear(ordinal)
            worker.is_probed = not worker.is_told if is_probed else worker.is_probed

    def hear(self, ordinal: int) -> None:
        worker = self.workers[ordinal]
        worker.is_told = name(ordinal) in self.commands
        worker.record = worker.state

    @rule(ordinal=ORDINALS, grace=st.none() | st.integers(0, 300))
    def a_worker_is_evicted(self, ordinal: int, grace: int | None) -> None:
        """Once more with less time, perhaps."""
        if ordinal in self.workers:
            worker = self.workers[ordinal]
            worker.ends, worker.grace = True, grace if worker.grace is None else worker.grace

    @rule(ordinal=ORDINALS)
    def an_evicted_worker_has_ended(self, ordinal: int) -> None:
        if ordinal in self.workers and self.workers[ordinal].ends:
            self.workers[ordinal] = ModelledWorker()

    @rule(ordinal=ORDINALS)
    def a_worker_crashes(self, ordinal: int) -> None:
        if ordinal in self.workers:
            before = self.workers[ordinal]
            self.workers[ordinal] = ModelledWorker(ends=before.ends, grace=before.grace)

    # etcd, and the operator.

    @rule(is_away=st.booleans())
    def etcd_goes_or_comes(self, is_away: bool) -> None:
        self.is_etcd_away = is_away

    @rule()
    def etcd_comes_back_empty(self) -> None:
        self.is_etcd_away = False
        self.commands.clear()
        for worker in self.workers.values():
            worker.record = None

    @rule()
    def the_operator_passes(self) -> None:
        self.act(self.plan())

    @precondition(lambda self: not self.is_etcd_away)
    @rule()
    def the_operator_dies_in_the_middle(self) -> None:
        self.commands = set(self.plan().commands)

    def plan(self) -> DrainPlan:
        records = {
            name(ordinal): worker.record
            for ordinal, worker in self.workers.items()
            if worker.record is not None
        }
        worker_records = (
            WorkerRecords(error="away")
            if self.is_etcd_away
            else WorkerRecords(records, frozenset(self.commands))
        )
        pods = [
            pod_state(
                *(OF, ordinal),
                ready=worker.is_probed,
                node="n",
                started=worker.is_ready,
                terminating=worker.ends,
                grace_seconds=worker.grace,
            )
            for ordinal, worker in self.workers.items()
        ]
        plan = plan_drain(
            [Workload(OF, self.desired)],
            (),
            [workload(OF, self.replicas, pods=tuple(pods))],
            worker_records,
            None,
        )
        replicas = plan.workloads[0].replicas
        assert plan.cut == ()
        assert replicas >= self.desired
        ending = {name(each): worker for each, worker in self.workers.items() if worker.ends}
        graces = {pod: worker.grace for pod, worker in ending.items() if worker.grace is not None}
        assert plan.graces == graces
        assert graces.keys() <= plan.commands
        serving = {
            ordinal
            for ordinal, worker in self.workers.items()
            if worker.is_ready and not worker.ends
        }
        left = {
            ordinal
            for ordinal in serving
            if ordinal < replicas and name(ordinal) not in plan.commands
        }
        assert left or not serving or not self.desired, "all that serve have drain commands"
        return plan

    def act(self, plan: DrainPlan) -> None:
        """Commands before replicas."""
        replicas = plan.workloads[0].replicas
        if not self.is_etcd_away:
            self.commands = set(plan.commands)
        for ordinal in range(replicas, self.replicas):
            worker = self.workers.pop(ordinal, ModelledWorker())
            if worker.ends:
                continue  # within its grace period
            assert not worker.num_requests, f"worker {ordinal} went with a request"
            assert worker.is_told or not worker.is_ready, (
                f"worker {ordinal} went while it might get a request"
            )
        for ordinal in range(self.replicas, replicas):
            self.workers[ordinal] = ModelledWorker()
        self.replicas = replicas

    def teardown(self) -> None:
        self.is_etcd_away = False
        for _ in range(4):
            for ordinal, worker in self.workers.items():
                worker.num_requests, worker.ends, worker.grace = 0, False, None
                self.hear(ordinal)
                worker.is_ready, worker.is_probed = True, not worker.is_told
            self.act(self.plan())
        assert self.replicas == self.desired == len(self.workers)
        assert not self.commands
        assert {worker.state for worker in self.workers.values()} <= {"ready"}
        plan = self.plan()
        assert (plan.workloads, plan.commands, plan.messages) == (
            (Workload(OF, self.desired),),
            frozenset(),
            {},
        )


def name(ordinal: int) -> str:
    return f"{OF.name}-{ordinal}"


TestDrain = DrainMachine.TestCase
TestDrain.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
