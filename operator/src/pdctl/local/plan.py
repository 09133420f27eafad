"""The worker processes of a PDCluster on one machine; pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.engine import MAX_THREADS, EngineSpec
from pdcluster_schema.faults import Fault, InvalidObjectError
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.sections import ENGINELESS, PICKER, PoolSpec
from pdcluster_schema.workload import process_name
from pdctl.local.gpus import DriverReport, Gpu, assign_gpus, gpu_variables

NO_GPUS = DriverReport(reason="it was not asked")

Slot = tuple[str, PoolSpec, int]
"""Role, pool and ordinal of a worker."""

MAX_PROCESSES = 64  # each loads the model again; more is a slip of the pen rather than a machine


@dataclass(frozen=True)
class CpuShare:
    """A worker among those that use each other's cores while idle.

    place: its index in `threads`, the threads of each.  cores: of all of them together.
    """

    place: int
    threads: tuple[int, ...]
    cores: int


@dataclass(frozen=True)
class ProcessSpec:
    """One worker process.  http_port, picker_port 0 = any free port, as its gRPC and KV ports
    always are.

    owns_cores:   no other worker's threads are planned on its cores.
    shared_cores: None = it uses its own threads only.
    """

    name: str
    role: str
    pool: PoolSpec
    ordinal: int
    engine: EngineSpec
    http_port: int
    picker_port: int
    owns_cores: bool
    devices: tuple[Gpu, ...] = ()
    shared_cores: CpuShare | None = None


@dataclass(frozen=True)
class LocalPlan:
    """ingress: the process at the service's port."""

    revision: str
    processes: tuple[ProcessSpec, ...]
    ingress: ProcessSpec


def plan_local(
    cluster: PDCluster, *, cores: int, port: int, driver: DriverReport = NO_GPUS
) -> LocalPlan:
    """port: of the first ingress worker; 0 = any free port.

    Raises InvalidObjectError for a spec that cannot run on one machine.
    """
    _check_runs_locally(cluster)
    gpus = assign_gpus(cluster, driver)
    slots = [
        (role, pool, ordinal)
        for role, spec in cluster.spec.roles.present().items()
        for pool in spec.pools
        for ordinal in range(pool.replicas)
    ]
    picker = cluster.spec.service.endpoint_picker
    first_picker = next((slot for slot in slots if slot[0] == PICKER), None)
    first_ingress = next(slot for slot in slots if slot[0] == cluster.spec.ingress_role)
    threads = max(1, cores // max(1, sum(slot[0] not in ENGINELESS for slot in slots)))
    engines = {
        slot: _with_threads(
            cluster.spec.engine_of(slot[0]), 0 if slot[0] in ENGINELESS else threads
        )
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
            picker_port=picker.port if picker is not None and slot == first_picker else 0,
            owns_cores=owns_cores,
            devices=gpus.get((slot[0], slot[1].name, slot[2]), ()),
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
    """share: cores for each worker; 0 = a router, which computes nothing."""
    if engine.threads or not share:
        return engine
    return engine.model_copy(update={"threads": min(share, MAX_THREADS)})


def _shared_cores(
    cluster: PDCluster, engines: Mapping[Slot, EngineSpec], cores: int
) -> dict[Slot, CpuShare]:
    """Only of workers with one engine process of ours and no `threads` in the spec."""
    sharing = {
        slot: engine.threads
        for slot, engine in engines.items()
        if slot[0] not in ENGINELESS
        and slot[1].gpu == NO_ACCELERATOR
        and _may_share(cluster.spec.engine_of(slot[0]))
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
    return not engine.is_stock and not engine.threads and processes == (1, 1, 1)


def _device_faults(cluster: PDCluster) -> Iterator[Fault]:
    """Variables of an engine that would go over those by which each worker has its own GPUs."""
    sections = {"spec.engine": cluster.spec.engine}
    for role, declared in cluster.spec.roles.computing().items():
        sections[f"spec.roles.{role}.engine"] = declared.engine
    for path, engine in sections.items():
        for index, each in enumerate(engine.env or ()):
            if each.name in gpu_variables(()):
                yield Fault(
                    f"{path}.env[{index}].name",
                    f"{each.name} is set by pdctl up, which gives each worker GPUs of its own",
                    "remove it, and set CUDA_VISIBLE_DEVICES of pdctl up to bound what they get",
                )


def _check_runs_locally(cluster: PDCluster) -> None:
    roles = cluster.spec.roles.present()
    faults: list[Fault] = []
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
    for role, spec in roles.items():
        for place, pool in enumerate(spec.pools):
            if (pods := cluster.spec.pods_per_replica(role, pool)) > 1:
                field = "gpusPerPod" if pool.pods_per_replica is None else "podsPerReplica"
                faults.append(
                    Fault(
                        f"spec.roles.{role}.pools[{place}].{field}",
                        f"a worker of pool {pool.name} would be {pods} pods, and there are no pods "
                        "here: a worker is one process of this machine",
                        f"leave {field} out, with ranks that one machine holds, or apply the file "
                        "to Kubernetes",
                    )
                )
    faults += _device_faults(cluster)
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
