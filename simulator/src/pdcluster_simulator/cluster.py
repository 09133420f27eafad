"""A PDCluster object as simulated workers: sizes of their engines, their links, their policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from pdcluster_api.manifests.worker_config import policy_file
from pdcluster_api.traces.requests import LoadTrace
from pdcluster_schema.faults import Fault, InvalidObjectError
from pdcluster_schema.pdcluster import PDCluster, PDClusterSpec
from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.sections import PoolSpec
from pdcluster_simulator.cell import Cell
from pdcluster_simulator.engine import SimulatedEngine
from pdcluster_simulator.events import OwnMachine, SharedMachine, SimulatedTime
from pdcluster_simulator.remote_prefill import Network
from pdcluster_simulator.requests import EngineWork
from pdcluster_simulator.results import Recorder
from pdcluster_simulator.step_model import StepModel
from pdcluster_simulator.workers import ClusterWorker, WorkerState
from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.messages.engine_settings import DelayerSettings, EngineSettings
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.routing.qos.averages import Meter

NVLINK_DOMAIN = "nvidia.com/gpu.clique"
"""Label of the nodes of one NVLink domain: workers within it move KV over its links."""
_STOCK_SIZES = {"maxBatchedTokens": 8192, "maxSequences": 1024}
_STOCK_FACTS = {"block_size", "max_batched_tokens", "max_sequences", "max_model_len"}


@dataclass(frozen=True)
class PoolModel:
    """times: of one worker; delayer: None = prompts are not held back"""

    key: tuple[str, str]
    gpu: str
    gpus_per_replica: int
    replicas: int
    settings: EngineSettings
    times: StepModel
    delayer: DelayerSettings | None


@dataclass(frozen=True)
class ClusterModel:
    """seed: of every draw.  link_bytes: per second"""

    cluster: PDCluster
    pools: Sequence[PoolModel]
    policy: PolicyConfig
    link_bytes: float
    num_routers: int = 0
    is_first_ingress_alone: bool = False
    has_priorities: bool = False
    seed: str = "0"

    @property
    def spec(self) -> PDClusterSpec:
        return self.cluster.spec

    @property
    def times(self) -> StepModel:
        """Those of the first decode pool, for all that is of no pool."""
        return next(each.times for each in self.pools if each.key[0] != "prefill")

    @property
    def num_workers(self) -> int:
        return sum(pool.replicas for pool in self.pools)

    @property
    def num_accelerators(self) -> int:
        return sum(pool.replicas * pool.gpus_per_replica for pool in self.pools)


def cluster_model(
    cluster: PDCluster,
    times: Mapping[tuple[str, str], StepModel],
    trace: LoadTrace,
    *,
    seed: str = "0",
    is_first_ingress_alone: bool = False,
) -> ClusterModel:
    """times: by (role, pool).  Raises InvalidObjectError with every fault."""
    spec = cluster.spec
    faults: list[Fault] = []
    pools: list[PoolModel] = []
    for role, declared in spec.roles.computing().items():
        for index, pool in enumerate(declared.pools):
            found = times[role, pool.name]
            model = _pool_model(spec, role, pool, found, has_prefixes=bool(trace.block_tokens))
            if isinstance(model, PoolModel):
                pools.append(model)
            else:
                place, reason, fix = model
                at = f"spec.roles.{role}.pools[{index}]" if place == "gpu" else "spec.engine"
                faults.append(Fault(f"{at}.{place}", reason, fix))
    link_bytes = _link_bytes(spec, pools) if not faults else 1.0
    if link_bytes is None:
        gpu = pools[0].gpu
        reason = f"{gpu} has no networkBytes, and the step times have no transferBytes"
        fix = f"give spec.accelerators.{gpu}.networkBytes, or transferBytes in the step times"
        faults.append(Fault("spec.roles.prefill.pools[0].gpu", reason, fix))
    if faults or link_bytes is None:
        raise InvalidObjectError(faults)
    routers = spec.roles.router
    return ClusterModel(
        cluster,
        pools,
        PolicyConfig.model_validate(policy_file(cluster)),
        link_bytes,
        num_routers=sum(each.replicas for each in routers.pools) if routers else 0,
        is_first_ingress_alone=is_first_ingress_alone,
        has_priorities=trace.has_priorities,
        seed=seed,
    )


def _pool_model(
    spec: PDClusterSpec, role: str, pool: PoolSpec, times: StepModel, *, has_prefixes: bool
) -> PoolModel | tuple[str, str, str]:
    """Or what cannot be simulated: a field, its reason and its fix."""
    if times.gpu != pool.gpu:
        reason = f"is {pool.gpu}, and the step times are of {times.gpu} ({times.machine})"
        return "gpu", reason, f"measure {pool.gpu}, or set the pool's gpu to {times.gpu}"
    config = _engine_config(spec, role, pool)
    if config.data_parallel_size > 1:
        reason = f"is {config.data_parallel_size}: an engine of several ranks is not simulated"
        return "dataParallelSize", reason, "set it to 1, with as many replicas more"
    size = config.block_size
    memory_tokens = int(config.kv_cache_memory // times.kv_bytes)
    num_blocks = config.num_blocks or (times.kv_tokens or memory_tokens) // size
    longest = config.max_model_len or (num_blocks - 1) * size
    if num_blocks < 2 or longest > num_blocks * size:
        reason = f"is {longest}, and the KV cache holds {num_blocks * size} tokens"
        return "maxModelLen", reason, "lower it, or raise kvCacheMemory"
    settings = EngineSettings(
        block_size=size,
        num_blocks=num_blocks,
        max_batched_tokens=config.max_batched_tokens,
        max_sequences=config.max_sequences,
        max_model_len=longest,
        prefix_caching=config.prefix_caching and has_prefixes,
        scheduler=config.scheduler_settings,
        admission_watermark=config.admission_watermark,
    )
    delayer = config.prefill_delayer if role != "decode" else None
    return PoolModel(
        (role, pool.name),
        pool.gpu,
        spec.gpus_per_replica(role, pool),
        pool.replicas,
        settings,
        times,
        delayer if delayer is not None and delayer.enabled else None,
    )


def _engine_config(spec: PDClusterSpec, role: str, pool: PoolSpec) -> EngineConfig:
    """As the worker's file gives it; of a stock engine, what its server process has to know."""
    engine = spec.engine_of(role)
    if not engine.is_stock:
        section: dict[str, Any] = engine.sized_for(pool.gpu).model_dump(
            mode="json", by_alias=True, exclude_defaults=True
        )
        return msgspec.convert(section, EngineConfig)
    given = engine.model_dump(
        mode="json", by_alias=True, exclude_unset=True, exclude_none=True, include=_STOCK_FACTS
    )
    return msgspec.convert({**_STOCK_SIZES, **given}, EngineConfig)


def _link_bytes(spec: PDClusterSpec, pools: Sequence[PoolModel]) -> float | None:
    """The slowest pool's: over the links of an NVLink domain that keeps all workers, or over the
    network.  None where that is not known and KV moves.
    """
    if spec.roles.prefill is None:
        return 1.0
    measured = [each.times.transfer_bytes for each in pools]
    known = [each for each in measured if each is not None]
    if len(known) == len(measured):
        return min(known)
    place = spec.placement
    is_linked = place is not None and place.domain_label == NVLINK_DOMAIN
    found = []
    for pool in pools:
        hardware = spec.hardware(pool.gpu)
        rate = hardware.link_bytes if is_linked else hardware.network_bytes
        if rate is None:
            return None
        found.append(float(rate) * pool.gpus_per_replica)
    return min(found)


class _WorkerEvents:
    """The events of one worker's engine, for its cell."""

    def __init__(self, cell: Cell, worker: ClusterWorker) -> None:
        self._cell, self._worker = cell, worker

    def on_token(self, request: EngineWork) -> None:
        if request.target is not None:
            self._cell.remote.on_first_token(request)
        else:
            self._cell.on_local_first(request)

    def on_gaps(self, seconds: float, number: int) -> None:
        self._cell.recorder.on_gaps(self._worker, seconds, number)

    def on_end(self, request: EngineWork) -> None:
        if request.target is None:
            self._cell.on_last(request)

    def on_computed(self, request: EngineWork, num_tokens: int) -> None:
        self._cell.remote.on_computed(request, num_tokens)

    def on_failed(self, request: EngineWork, reason: str) -> None:
        self._cell.on_engine_failed(request, reason)

    def on_freed(self) -> None:
        self._cell.remote.on_freed(self._worker)


class ClusterBuilder:
    """Makes the workers of one simulated cluster, at its start and as it grows."""

    def __init__(
        self, model: ClusterModel, queue: SimulatedTime, recorder: Recorder, revision: str = ""
    ) -> None:
        self.model, self.queue, self.recorder = model, queue, recorder
        self._revision = revision
        self._pools = {pool.key: pool for pool in model.pools}
        times = model.times
        network = Network(model.link_bytes, times.transfer_seconds, times.kv_bytes)
        decode = next(pool for pool in model.pools if pool.key[0] != "prefill")
        self.cell = Cell(
            queue,
            model.policy,
            times,
            network,
            recorder,
            draw=Random(" ".join(filter(None, ("simulation", model.seed, revision)))),
            block_size=decode.settings.block_size,
            has_priorities=model.has_priorities,
        )
        self.cell.is_first_ingress_alone = model.is_first_ingress_alone
        shared = times.shared_rates
        self._machine = SharedMachine(queue, shared) if shared else None

    def of_revision(self, revision: str) -> "ClusterBuilder":
        """For workers that pair with none of these, on the same machines."""
        found = ClusterBuilder(self.model, self.queue, self.recorder, revision)
        found._machine = self._machine
        return found

    def start(self) -> Cell:
        """With every worker ready."""
        for pool in self.model.pools:
            for ordinal in range(pool.replicas):
                self.add(pool.key, ordinal, WorkerState.READY)
        self.cell.renew(self.model.num_routers)
        return self.cell

    def add(self, key: tuple[str, str], ordinal: int, state: WorkerState) -> ClusterWorker:
        """A worker that the cell knows from now on."""
        pool, queue = self._pools[key], self.queue
        role, name = key
        worker = ClusterWorker(
            key="-".join(filter(None, (role, name, self._revision, str(ordinal)))),
            pool=key,
            ordinal=ordinal,
            gpu=pool.gpu,
            num_gpus=pool.gpus_per_replica,
            state=state,
            since=queue.now,
        )
        worker.engine = SimulatedEngine(
            queue,
            self._machine or OwnMachine(queue),
            pool.settings,
            pool.times,
            _WorkerEvents(self.cell, worker),
            delayer=pool.delayer,
        )
        worker.meter = Meter(lambda: queue.now)
        if role == "prefill":
            worker.ledger = self._ledger(worker)
        worker.report()
        self.cell.add(worker)
        return worker

    def _ledger(self, worker: ClusterWorker) -> CreditLedger:
        policy, size = self.model.policy, worker.engine.settings.max_batched_tokens
        found = CreditLedger(
            max(1, int(policy.credits.batches_ahead * size)), lambda: self.queue.now
        )
        found.set_policy(policy.prefill_queue, size)
        return found

    def change_role(self, worker: ClusterWorker, pool: tuple[str, str]) -> None:
        """A drained worker serves as one of that pool, with its engine as it is."""
        worker.pool, worker.next_pool = pool, None
        worker.engine.take_times(self._pools[pool].times)
        if worker.role == "prefill":
            worker.ledger = worker.ledger or self._ledger(worker)
            worker.ledger.resume()
        worker.report()
        self.cell.place(worker)
