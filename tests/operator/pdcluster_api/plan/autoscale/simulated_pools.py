"""Pools of pods as StatefulSets keep them, on nodes that hold so many of a type, and what their
workers show under a load.

Naive on purpose: every pod is an entry by ordinal, nothing is summed up ahead.
A decision is carried out in the worst order: new pods at once, before any old one has gone.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from pdcluster_api.plan.autoscale.values import PoolFacts, PoolSample, WorkerSample
from pdcluster_schema.workload import PoolKey
from tests.operator.pdcluster_api.plan.autoscale.worlds import IDLE

WAITING, STARTING, READY, ENDING = "waiting", "starting", "ready", "ending"
# requests in a second that one worker serves, and that one worker too few leaves in the queue
QUEUE_RATE = 0.5
LONGEST_QUEUE = 300.0


@dataclass
class Pod:
    """One pod.  since: when it came; stale: whether it does not answer scrapes."""

    state: str
    since: float
    stale: bool = False


@dataclass
class SimulatedPool:
    """A StatefulSet: pods by ordinal, the highest goes first."""

    role: str
    name: str
    gpu: str
    replicas: int
    gpus_per_replica: int = 1
    pods: dict[int, Pod] = field(default_factory=dict)

    @property
    def key(self) -> PoolKey:
        return self.role, self.name

    def having(self, state: str) -> list[int]:
        return [ordinal for ordinal, pod in sorted(self.pods.items()) if pod.state == state]

    def pod_name(self, ordinal: int) -> str:
        return f"{self.role}-{self.name}-{ordinal}"

    @property
    def top(self) -> int:
        """The highest ordinal and one: below it every pod may come again."""
        return max((ordinal + 1 for ordinal in self.pods), default=0)

    def facts(self, now: float) -> PoolFacts:
        ending = [
            ordinal
            for ordinal, pod in self.pods.items()
            if pod.state == ENDING or ordinal >= self.replicas
        ]
        waiting, ready = (
            [each for each in self.having(state) if each not in ending]
            for state in (WAITING, READY)
        )
        top = 0
        while self.replicas - 1 - top in waiting:
            top += 1
        unready = 0
        while unready < self.replicas and self.replicas - 1 - unready not in ready:
            unready += 1
        return PoolFacts(
            role=self.role,
            pool=self.name,
            gpu=self.gpu,
            gpus_per_replica=self.gpus_per_replica,
            replicas=self.replicas,
            current=len(self.pods),
            ready=len(ready),
            ending=len(ending),
            top=self.top,
            unschedulable=len(waiting),
            unschedulable_top=top,
            unready_top=unready,
            leaving=frozenset(self.pod_name(ordinal) for ordinal in ending),
            unschedulable_seconds=max(
                (now - self.pods[each].since for each in waiting), default=0.0
            ),
        )


@dataclass
class SimulatedCluster:
    """All pools.

    nodes: pods that fit of each type; load: work of each role in busy workers; queues: requests
           that wait; now: seconds
    noise: of each scrape of each worker, a share
    """

    pools: list[SimulatedPool]
    nodes: dict[str, int]
    load: dict[str, float]
    now: float = 0.0
    windows: dict[PoolKey, list[PoolSample]] = field(default_factory=dict)
    queues: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def facts(self) -> list[PoolFacts]:
        return [pool.facts(self.now) for pool in self.pools]

    def carry_out(self, replicas: Mapping[PoolKey, int]) -> None:
        for pool in self.pools:
            pool.replicas = replicas[pool.key]
        for pool in self.pools:
            for ordinal in range(pool.replicas):
                self._ensure(pool, ordinal)
        for pool in self.pools:
            for ordinal, pod in list(pool.pods.items()):
                if ordinal >= pool.replicas:
                    self._stop(pool, ordinal, pod)

    def _ensure(self, pool: SimulatedPool, ordinal: int) -> None:
        pod = pool.pods.get(ordinal)
        if pod is None:
            pool.pods[ordinal] = Pod(WAITING, self.now)
        elif pod.state == ENDING:
            pod.state = READY  # it drained, and is taken back

    def _stop(self, pool: SimulatedPool, ordinal: int, pod: Pod) -> None:
        if pod.state == READY:
            pod.state = ENDING
        elif pod.state != ENDING:
            del pool.pods[ordinal]

    def schedule(self) -> None:
        """Give waiting pods a node where there is one."""
        for pool in self.pools:
            for ordinal in pool.having(WAITING):
                if self.num_on_nodes(pool.gpu) < self.nodes[pool.gpu]:
                    pool.pods[ordinal].state = STARTING

    def num_on_nodes(self, gpu: str) -> int:
        return sum(
            pod.state != WAITING
            for pool in self.pools
            if pool.gpu == gpu
            for pod in pool.pods.values()
        )

    def start(self) -> None:
        for pod in self._pods():
            if pod.state == STARTING:
                pod.state = READY

    def end(self) -> None:
        for pool in self.pools:
            for ordinal in pool.having(ENDING):
                del pool.pods[ordinal]

    def _pods(self) -> Iterator[Pod]:
        for pool in self.pools:
            yield from pool.pods.values()

    def num_accelerators(self, gpu: str | None = None) -> int:
        """That pods hold, of a type or of all."""
        return sum(
            len(pool.pods) * pool.gpus_per_replica for pool in self.pools if gpu in (None, pool.gpu)
        )

    def ready_of(self, role: str) -> int:
        return sum(len(pool.having(READY)) for pool in self.pools if pool.role == role)

    def pass_time(self, seconds: float) -> None:
        """Serve the load that comes in, or let it wait."""
        self.now += seconds
        for role, load in self.load.items():
            more = (load - self.ready_of(role)) * QUEUE_RATE * seconds
            self.queues[role] = min(LONGEST_QUEUE, max(0.0, self.queues.get(role, 0.0) + more))

    def scrape(self) -> None:
        """One round of every pool."""
        for pool in self.pools:
            ready, waiting = self.ready_of(pool.role), self.queues.get(pool.role, 0.0)
            share = (1.0 if waiting else min(1.0, self.load[pool.role] / ready)) if ready else 0.0
            queue = waiting / ready if ready else 0.0
            worker = replace(
                IDLE,
                engine_busy_ratio=share,
                kv_cache_usage_ratio=share,
                num_requests_waiting=queue,
                prefill_queue_requests=queue if pool.role == "prefill" else 0.0,
            )
            self.windows.setdefault(pool.key, []).append(self._sample(pool, worker))
            del self.windows[pool.key][:-12]

    def _sample(self, pool: SimulatedPool, worker: WorkerSample) -> PoolSample:
        """Those that drain say that they are full, which counts for nothing."""
        ready, ending = pool.having(READY), pool.having(ENDING)
        fresh = [
            replace(self._noisy(worker), pod=pool.pod_name(each))
            for each in ready
            if not pool.pods[each].stale
        ]
        full = [
            replace(
                IDLE,
                pod=pool.pod_name(each),
                num_requests_waiting=100.0,
                kv_cache_usage_ratio=1.0,
                engine_busy_ratio=1.0,
            )
            for each in ending
        ]
        return PoolSample(
            self.now,
            (*fresh, *full),
            tuple(pool.pod_name(each) for each in ready if pool.pods[each].stale),
        )

    def _noisy(self, worker: WorkerSample) -> WorkerSample:
        share, queue = (1.0 + self.chance.uniform(-self.noise, self.noise) for _ in range(2))
        busy = min(1.0, worker.engine_busy_ratio * share)
        waiting, requests = (
            worker.num_requests_waiting * queue,
            worker.prefill_queue_requests * queue,
        )
        return replace(
            worker,
            engine_busy_ratio=busy,
            kv_cache_usage_ratio=busy,
            num_requests_waiting=waiting,
            prefill_queue_requests=requests,
        )
