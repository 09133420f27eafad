"""AcceleratorsInUse: whether workers compute on the accelerators that their pools reserve, by their
records. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdcluster_api.plan.observed.pools import RoleView
from pdcluster_api.plan.observed.state import PodState, Previous, WorkerDevice, WorkerRecords
from pdcluster_api.plan.status.condition import Condition
from pdcluster_schema import conditions as words
from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.pdcluster import PDCluster

_TYPE = words.ACCELERATORS_IN_USE
# The kind of device that is no accelerator, and the value of engine.device that asks for it
CPU = "cpu"

# The kind of device that a stock engine does not say; the worker's note has the reason
UNKNOWN = "unknown"


@dataclass(frozen=True)
class _Pool:
    """A declared pool with an accelerator."""

    name: str
    gpu: str
    requested: str  # engine.device of its role
    resource: str | None  # reserved by each of its pods; None = nothing but cpu and memory
    desired: int  # workers that it should have
    # of the declared revision and of the one that serves, but for those that end
    pods: tuple[PodState, ...]
    # devices that its ready workers report, in the order of their pods
    devices: Mapping[str, WorkerDevice]

    def refusal(self) -> str | None:
        """Reason why the first of its workers without its device lacks it."""
        problems = [pod.problem for pod in self.pods if pod.problem is not None]
        found = sorted(
            reported for reason, reported in problems if reason == words.ACCELERATOR_UNUSABLE
        )
        return f"{self.name} ({self.gpu}): {found[0]}" if found else None

    def unknown(self) -> str | None:
        """Say that a worker does not report what its engine computes on, and why."""
        for pod, device in self.devices.items():
            if device.kind == UNKNOWN:
                why = f"does not know what its engine computes on: {device.note}"
                return f"{self.name}: {pod} {why}"
        return None

    def idle(self) -> str | None:
        """Say that its accelerators are reserved and do not compute, and the fix."""
        on_cpu = [(pod, device) for pod, device in self.devices.items() if device.kind == CPU]
        if not on_cpu:
            return None
        why, fix = f"as engine.device: {CPU} asks", ""
        if self.requested != CPU:
            why = "which is not what it was asked for"
            fix = f", or use a worker image that computes on {self.gpu}"
        pod, device = on_cpu[0]
        has = f"reserves {self.resource} ({self.gpu})" if self.resource else f"is of {self.gpu}"
        found = f"{self.name} {has}, and {pod} computes on {_named(device)}, {why}"
        return f"{found}: make it a pool with gpu: cpu{fix}"


def accelerators_in_use(
    cluster: PDCluster,
    views: Sequence[RoleView],
    worker_records: WorkerRecords | None,
    previous: Previous,
) -> Condition | None:
    """The condition; None = no declared pool has an accelerator.  While etcd does not answer what
    workers say stays as it was.
    """
    pools = list(_pools(cluster, views, worker_records.devices if worker_records else {}))
    if not pools:
        return None
    if refusals := [why for pool in pools if (why := pool.refusal())]:
        return Condition.false(_TYPE, words.ACCELERATOR_UNUSABLE, "; ".join(refusals))
    if worker_records is None or worker_records.error is not None:
        nothing = "etcd, where workers say what they compute on, has not answered yet"
        # a refusal says nothing of devices, and its pod is checked each time
        kept = Condition.kept(previous, _TYPE)
        is_kept = kept is not None and kept.reason != words.ACCELERATOR_UNUSABLE
        return kept if is_kept else _unknown(nothing)
    if idle := [why for pool in pools if (why := pool.idle())]:
        return Condition.false(_TYPE, words.ACCELERATORS_IDLE, "; ".join(idle))
    if unknown := [why for pool in pools if (why := pool.unknown())]:
        return _unknown("; ".join(unknown))
    reporting = {pool.name: pool.devices for pool in pools if pool.devices}
    silent = [pool.name for pool in pools if pool.desired and pool.name not in reporting]
    if silent or not reporting:
        whose = f" of {', '.join(silent)}" if silent else ""
        return _unknown(f"no ready worker{whose} has said what it computes on")
    listed = ", ".join(
        f"{name} on {' and '.join(sorted(set(map(_named, devices.values()))))}"
        for name, devices in reporting.items()
    )
    message = f"workers compute on what their pools have: {listed}"
    return Condition.true(_TYPE, words.AS_DECLARED, message)


def _pools(
    cluster: PDCluster, views: Sequence[RoleView], devices: Mapping[str, WorkerDevice]
) -> Iterator[_Pool]:
    roles = cluster.spec.roles.present()
    for view in views:
        requested = cluster.spec.engine_of(view.name).device
        specs = {pool.name: pool for pool in roles[view.name].pools}
        for pool in view.pools:
            spec = specs[pool.declared.name]
            resource = cluster.spec.accelerator_of(spec).resource
            if spec.gpu == NO_ACCELERATOR or (requested == CPU and resource is None):
                continue
            states = [state for state in (pool.target, pool.shown) if state is not None]
            pods = {pod.name: pod for state in states for pod in state.pods if not pod.terminating}
            ready = sorted(name for name, pod in pods.items() if pod.ready and name in devices)
            yield _Pool(
                f"{view.name} pool {spec.name}",
                spec.gpu,
                requested,
                resource,
                pool.desired,
                tuple(pods.values()),
                {name: devices[name] for name in ready},
            )


def _named(device: WorkerDevice) -> str:
    """Its name, and what a user must know of it."""
    return (device.name or device.kind) + (f" ({device.note})" if device.note else "")


def _unknown(message: str) -> Condition:
    return Condition.unknown(_TYPE, words.DEVICE_NOT_SAID, message)
