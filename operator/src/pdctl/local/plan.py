"""The plan of one machine: which worker processes a PDCluster becomes.

Pure: the same spec and machine give the same plan.  Paths, certificates and
etcd endpoints are for `local.run_files` to fill in; Kubernetes workloads are planned from
the same spec elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pdcluster_api.errors import Fault, InvalidObjectError
from pdcluster_api.schema.engine import MAX_THREADS, EngineSpec
from pdcluster_api.schema.names import process_name
from pdcluster_api.schema.pdcluster import PDCluster
from pdcluster_api.schema.revision import revision_of
from pdcluster_api.schema.sections import ROUTER, PoolSpec
from pdcluster_api.schema.vllm_engine import VLLM

Slot = tuple[str, PoolSpec, int]
"""Role, pool and ordinal of a worker."""

MAX_PROCESSES = 64  # each loads the model again; more is a slip of the pen rather than a machine


@dataclass(frozen=True)
class CpuShare:
    """A worker's place among those that lend each other their cores while they are idle.

    place: in `threads`, which are each one's own.  cores: of all of them together.
    """

    place: int
    threads: tuple[int, ...]
    cores: int


@dataclass(frozen=True)
class ProcessSpec:
    """One worker process.  http_port 0 = any free port; gRPC and KV ports are always any free port.

    owns_cores: its threads have cores that no other worker's threads are planned on.
    shared_cores: None where it always has its own threads.
    """

    name: str
    role: str
    pool: PoolSpec
    ordinal: int
    engine: EngineSpec
    http_port: int
    owns_cores: bool
    shared_cores: CpuShare | None = None


@dataclass(frozen=True)
class LocalPlan:
    """Every process of one revision; `ingress` is the one at the service's port."""

    revision: str
    processes: tuple[ProcessSpec, ...]
    ingress: ProcessSpec


def plan_local(cluster: PDCluster, *, cores: int, port: int) -> LocalPlan:
    """Plan the processes of a cluster on a machine with so many cores.

    port: where the first ingress worker serves; 0 = any free port
    Raises InvalidObjectError for a spec that is right but cannot run on one machine.
    """
    _check_runs_locally(cluster)
    slots = [
        (role, pool, ordinal)
        for role, spec in cluster.spec.roles.present().items()
        for pool in spec.pools
        for ordinal in range(pool.replicas)
    ]
    first_ingress = next(slot for slot in slots if slot[0] == cluster.spec.ingress_role)
    threads = max(1, cores // max(1, sum(slot[0] != ROUTER for slot in slots)))
    engines = {
        slot: _with_threads(cluster.spec.engine_of(slot[0]), 0 if slot[0] == ROUTER else threads)
        for slot in slots
    }
    owns_cores = sum(engine.threads for engine in engines.values()) <= cores
    shared = _shared_cores(cluster, engines, cores) if owns_cores else {}
    processes = {
        slot: ProcessSpec(
            name=process_name(cluster.metadata.name, slot[0], slot[1].name, slot[2]),
            role=slot[0],
            pool=slot[1],
            ordinal=slot[2],
            engine=engines[slot],
            http_port=port if slot == first_ingress else 0,
            owns_cores=owns_cores,
            shared_cores=shared.get(slot),
        )
        for slot in slots
    }
    return LocalPlan(
        revision=revision_of(cluster.spec),
        processes=tuple(processes.values()),
        ingress=processes[first_ingress],
    )


def _with_threads(engine: EngineSpec, share: int) -> EngineSpec:
    """The engine with its share of the machine's cores, at most what a spec may say, unless the
    spec says how many threads; 0 = a router's, which computes nothing.
    """
    if engine.threads or not share:
        return engine
    return engine.model_copy(update={"threads": min(share, MAX_THREADS)})


def _shared_cores(
    cluster: PDCluster, engines: Mapping[Slot, EngineSpec], cores: int
) -> dict[Slot, CpuShare]:
    """Places of the workers that share cores: those with one engine of ours, of one process, whose
    spec leaves the number of threads to us.
    """
    sharing = {
        slot: engine.threads
        for slot, engine in engines.items()
        if slot[0] != ROUTER and _may_share(cluster.spec.engine_of(slot[0]))
    }
    fixed = sum(engine.threads for slot, engine in engines.items() if slot not in sharing)
    threads = tuple(sharing.values())
    return {slot: CpuShare(place, threads, cores - fixed) for place, slot in enumerate(sharing)}


def _may_share(engine: EngineSpec) -> bool:
    processes = (
        engine.tensor_parallel_size,
        engine.pipeline_parallel_size,
        engine.data_parallel_size,
    )
    return engine.type != VLLM and not engine.threads and processes == (1, 1, 1)


def _check_runs_locally(cluster: PDCluster) -> None:
    roles = cluster.spec.roles.present()
    faults = [
        Fault(
            f"spec.roles.{role}.pools[{index}].gpu",
            f"pdctl runs cpu pools on this machine, not {pool.gpu}",
            "use gpu: cpu here; pools of GPUs run on Kubernetes",
        )
        for role, spec in roles.items()
        for index, pool in enumerate(spec.pools)
        if pool.gpu != "cpu"
    ]
    ingress = cluster.spec.ingress_role
    if not any(pool.replicas for pool in roles[ingress].pools):
        faults.append(
            Fault(
                f"spec.roles.{ingress}.pools",
                f"no {ingress} worker would answer requests",
                "set replicas to 1 or more",
            )
        )
    if cluster.spec.discovery.etcd.tls_secret is not None:
        reason, fix = (
            "there are no Secrets on this machine, and pdctl reaches no etcd by TLS",
            "leave endpoints and tlsSecret out here",
        )
        faults.append(Fault("spec.discovery.etcd.tlsSecret", reason, fix))
    num_processes = sum(pool.replicas for spec in roles.values() for pool in spec.pools)
    if num_processes > MAX_PROCESSES:
        faults.append(
            Fault(
                "spec.roles",
                f"{num_processes} replicas in all, and one machine runs at most {MAX_PROCESSES} "
                "processes",
                f"lower replicas to a sum of {MAX_PROCESSES}, or apply the file to Kubernetes",
            )
        )
    if faults:
        raise InvalidObjectError(faults)
