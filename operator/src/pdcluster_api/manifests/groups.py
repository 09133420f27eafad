"""A worker of several pods: from the pod of its leader, which serves, the one of its followers, the
two StatefulSets of each worker, and its PodGroup, by which all pods get nodes at once, or none
does. Pure; docs/design/worker-groups.md.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pdcluster_api.manifests.objects import (
    Manifest,
    Owner,
    field_variables,
    new_object,
    workload_selector,
)
from pdcluster_api.manifests.vllm import ENGINE_CONTAINER
from pdcluster_schema.labels import (
    COMPONENT,
    FOLLOWER_OF,
    PODS_PER_REPLICA,
    ROLE,
    WORKER,
)
from pdcluster_schema.placement import PlacementSpec
from pdcluster_schema.ports import HEAD_PORT, HTTP_PORT, KV_PORT
from pdcluster_schema.workload import GroupId, WorkloadId


class GangScheduler(NamedTuple):
    kind: str  # its PodGroup, as `new_object` takes it
    mark: tuple[str, str]  # of its pods: `labels` or `annotations`, and the key of the group's name
    # of its pods, where their template names none; empty = the cluster's default may be it
    scheduler_name: str = ""


GANG_SCHEDULERS = {
    "PodGroup": GangScheduler(
        "scheduling.x-k8s.io/v1alpha1/PodGroup", ("labels", "scheduling.x-k8s.io/pod-group")
    ),
    "Volcano": GangScheduler(
        "scheduling.volcano.sh/v1beta1/PodGroup",
        ("annotations", "scheduling.k8s.io/group-name"),
        "volcano",
    ),
}


def gang_of(placement: PlacementSpec | None) -> dict[str, Any]:
    """The part of a record by which each worker has a PodGroup."""
    if placement is None or placement.gang is None:
        return {}
    queue = {} if placement.queue is None else {"queue": placement.queue}
    return {"gang": {"scheduler": placement.gang, **queue}}


def pod_group(
    gang: Manifest, marks: dict[str, str], num_pods: int, owner: Owner, pod: Manifest
) -> Manifest:
    """marks: of the worker's objects, by which it is named too; pod: its spec."""
    spec = {"minMember": num_pods, **({"queue": gang["queue"]} if "queue" in gang else {})}
    if gang["scheduler"] == "Volcano" and "priorityClassName" in pod:
        spec["priorityClassName"] = pod["priorityClassName"]  # which it takes from nowhere else
    kind = GANG_SCHEDULERS[gang["scheduler"]].kind
    return new_object(kind, marks[WORKER], owner, marks, spec=spec)


def in_gang(gang: Manifest, template: Manifest, name: str) -> Manifest:
    """The template of pods that are members.  name: of the PodGroup"""
    _, (field, key), scheduler_name = GANG_SCHEDULERS[gang["scheduler"]]
    metadata, default = template["metadata"], {"schedulerName": scheduler_name}
    return {
        **template,
        "metadata": {**metadata, field: {**metadata.get(field, {}), key: name}},
        "spec": {**(default if scheduler_name else {}), **template["spec"]},
    }


CONTAINER = "worker"
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
_SERVERS = "--api-server-count"
_OF_SGLANG = "--dist-init-addr"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_OF_SERVER = ("readinessProbe", "livenessProbe", "startupProbe", "lifecycle")
# Waits until the leader's server has finished its requests, which need all ranks, and is gone
_OUTLIVE_LEADER = f"""\
import os, socket, time
while True:
    try:
        socket.create_connection((os.environ["LWS_LEADER_ADDRESS"], {HTTP_PORT}), 5).close()
    except OSError:
        break
    time.sleep(1)
"""
# A follower is ready when its worker is, so that a budget counts no pods of workers that are not
_ASK_LEADER = f"""\
import os, socket, sys
with socket.create_connection((os.environ["LWS_LEADER_ADDRESS"], {HTTP_PORT}), 4) as leader:
    leader.settimeout(4)
    leader.sendall(b"GET /ready HTTP/1.0\\r\\n\\r\\n")
    sys.exit(leader.recv(64).split(b" ")[1:2] != [b"200"])
"""
_READINESS = {
    "exec": {"command": ["python3", "-c", _ASK_LEADER]},
    "periodSeconds": 10,
    "timeoutSeconds": 10,
    "failureThreshold": 2,
}
_JOIN_SECONDS = 3600  # where a user's template has removed the probe
_LIFECYCLE = {"preStop": {"exec": {"command": ["python3", "-c", _OUTLIVE_LEADER]}}}


def group_variables(workload: WorkloadId, namespace: str, num_pods: int) -> list[Manifest]:
    """LeaderWorkerSet's names, by which programs for several pods know them. The rank is the
    ordinal of the pod: of followers they begin with 1.
    """
    service = f"{workload.cluster}-workers.{namespace}.svc"
    index = "metadata.labels['apps.kubernetes.io/pod-index']"
    return [
        *field_variables(
            {"PDCLUSTER_WORKER": f"metadata.labels['{WORKER}']", "LWS_WORKER_INDEX": index}
        ),
        {"name": "LWS_LEADER_ADDRESS", "value": f"$(PDCLUSTER_WORKER)-0.{service}"},
        {"name": "LWS_GROUP_SIZE", "value": str(num_pods)},
    ]


def leader_template(template: Manifest, variables: list[Manifest], num_pods: int) -> Manifest:
    """template: of the pod, with the user's over it"""
    spec, metadata = dict(template["spec"]), template["metadata"]
    for field in ("initContainers", "containers"):
        if field in spec:
            spec[field] = [_with_variables(each, variables) for each in spec[field]]
    annotations = {**metadata.get("annotations", {}), PODS_PER_REPLICA: str(num_pods)}
    return {**template, "metadata": {**metadata, "annotations": annotations}, "spec": spec}


def _with_variables(container: Manifest, variables: list[Manifest]) -> Manifest:
    own = container.get("env") or []
    given = {each.get("name") for each in own}
    return {**container, "env": [*(v for v in variables if v["name"] not in given), *own]}


def follower_template(leader: Manifest, role: str) -> Manifest:
    """The pod of a worker's other ranks or engines: what computes, without what serves."""
    spec, metadata = dict(leader["spec"]), leader["metadata"]
    engines = [each for each in spec.get("initContainers", ()) if _is_engine(each)]
    mains = [_stock(each) for each in engines] or [
        _headless(each) for each in spec["containers"] if each["name"] == CONTAINER
    ]
    spec["containers"] = [
        *mains,
        *(each for each in spec["containers"] if each["name"] != CONTAINER),
    ]
    if engines:
        # as its pod's first process it would not end by SIGTERM before it handles that, which it
        # does once it has loaded: its worker could not start again for the whole grace period
        spec.setdefault("shareProcessNamespace", True)
    if "initContainers" in spec:
        spec["initContainers"] = [each for each in spec["initContainers"] if not _is_engine(each)]
    spec.pop("topologySpreadConstraints", None)
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    fields = ("volumeMounts", "volumeDevices")
    uses = (use for one in containers for field in fields for use in one.get(field) or ())
    # without the server's key, which no container mounts; one without a name is the API server's
    # to refuse
    used = {None, *(use.get("name") for use in uses)}
    spec["volumes"] = [each for each in spec.get("volumes") or () if each.get("name") in used]
    marks = {**metadata["labels"], ROLE: FOLLOWER_OF[role], COMPONENT: FOLLOWER_OF[role]}
    main = {DEFAULT_CONTAINER: spec["containers"][0]["name"]}
    of_pod = {"labels": marks, "annotations": {**metadata["annotations"], **main}}
    return {**leader, "metadata": {**metadata, **of_pod}, "spec": spec}


def _is_engine(container: Manifest) -> bool:
    return container.get("name") == ENGINE_CONTAINER


def _stock(engine: Manifest) -> Manifest:
    """A stock engine's ranks, which end with those of the leader."""
    kept = {
        name: value for name, value in engine.items() if name not in (*_OF_SERVER, "restartPolicy")
    }
    # its number is that of the leader, where it is given, and vLLM refuses any beside --headless
    given = [*(engine.get("command") or ()), *(engine.get("args") or ())]
    servers = [_SERVERS, "0"] if _SERVERS in given else []
    # a rank of SGLang knows by its number that it is no leader
    more = [] if _OF_SGLANG in given else [*servers, "--headless"]
    flags = _with_flags(engine, more)
    return {**kept, **flags, "readinessProbe": _READINESS, "lifecycle": _LIFECYCLE}


def _with_flags(container: Manifest, flags: list[str]) -> Manifest:
    """Behind its command; a user's template may have left it to the image, which takes `args`."""
    field = "command" if container.get("command") else "args"
    return {field: [*(container.get(field) or ()), *flags]}


def _headless(worker: Manifest) -> Manifest:
    """An engine of ours, which has started when its KV port is open."""
    kept = {name: value for name, value in worker.items() if name not in _OF_SERVER}
    head = ["--headless", "--head", f"$(LWS_LEADER_ADDRESS):{HEAD_PORT}"]
    given = worker.get("startupProbe") or {}
    probe = {name: value for name, value in given.items() if name != "httpGet"}
    seconds = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)  # Kubernetes' own
    if not given:
        seconds = _JOIN_SECONDS
    return {
        **kept,
        **_with_flags(worker, [*head, "--join-seconds", str(seconds)]),
        "startupProbe": {**probe, "tcpSocket": {"port": KV_PORT}},
        "readinessProbe": _READINESS,
        "lifecycle": _LIFECYCLE,
    }


def placement_of_groups(placement: PlacementSpec | None) -> Manifest:
    """The part of a record by which `group_sets` places each worker."""
    if placement is None or placement.domain_label is None:
        return {}
    return {"placement": {"domainLabel": placement.domain_label, "mode": placement.mode}}


class GroupRun(NamedTuple):
    is_stopped: bool  # it starts again as a whole: no pod may run until all have ended
    notes: Mapping[str, str] = MappingProxyType({})  # annotations: its pods and its last restart


def group_sets(
    record: Mapping[str, Any],
    workload: WorkloadId,
    replicas: int,
    owner: Owner,
    runs: Mapping[GroupId, GroupRun] = MappingProxyType({}),
) -> Iterator[Manifest]:
    """StatefulSets and PodGroups of all workers of a workload.  runs: of those that are there"""
    group = record["data"]["group"]
    for index in range(replicas):
        worker = GroupId(workload, index)
        run = runs.get(worker, GroupRun(is_stopped=False))
        notes = {PODS_PER_REPLICA: str(group["pods"]), **run.notes}
        for name, part, num_pods in (
            (worker.leader, record["data"]["statefulSet"], 1),
            (worker.followers, group["followers"], group["pods"] - 1),
        ):
            marks = {**part["metadata"]["labels"], WORKER: worker.leader}
            if name == worker.leader and "gang" in group:
                pod = part["spec"]["template"]["spec"]
                yield pod_group(group["gang"], marks, group["pods"], owner, pod)
            yield new_object(
                "apps/v1/StatefulSet",
                name,
                owner,
                marks,
                annotations=notes,
                spec={
                    "replicas": 0 if run.is_stopped else num_pods,
                    **_of_worker(part["spec"], worker, group),
                },
            )


def _of_worker(spec: Manifest, worker: GroupId, group: Manifest) -> Manifest:
    """All that is the same for each worker is shared: a copy would take most of the time."""
    template, mark = spec["template"], {WORKER: worker.leader}
    if "gang" in group:
        template = in_gang(group["gang"], template, worker.leader)
    metadata, pod = template["metadata"], template["spec"]
    if placement := group.get("placement"):
        affinity = dict(pod.get("affinity", {}))
        for kind, terms in _affinity(worker, placement).items():
            rule = affinity[kind] = dict(affinity.get(kind, {}))
            for when, term in terms.items():
                rule[when] = [*rule.get(when, ()), term]
        pod = {**pod, "affinity": affinity}
    metadata = {**metadata, "labels": {**metadata["labels"], **mark}}
    selector = {"matchLabels": {**spec["selector"]["matchLabels"], **mark}}
    template = {**template, "metadata": metadata, "spec": pod}
    return {**spec, "selector": selector, "template": template}


def _affinity(worker: GroupId, placement: Manifest) -> Manifest:
    """All pods of a worker in one domain; Exclusive = and no other worker of several pods there."""
    key = placement["domainLabel"]
    own = {"labelSelector": {"matchLabels": {WORKER: worker.leader}}, "topologyKey": key}
    if placement["mode"] == "Preferred":
        return {"podAffinity": {_PREFERRED: {"weight": 100, "podAffinityTerm": own}}}
    affinity = {"podAffinity": {_REQUIRED: own}}
    if placement["mode"] == "Exclusive":
        others = [
            {"key": WORKER, "operator": "Exists"},
            {"key": WORKER, "operator": "NotIn", "values": [worker.leader]},
        ]
        term = {"labelSelector": {"matchExpressions": others}, "topologyKey": key}
        affinity["podAntiAffinity"] = {_REQUIRED: term}
    return affinity


def group_budget(workload: WorkloadId, num_workers: int, num_pods: int) -> Manifest:
    """Selector and bound over the pods of all workers: with one of them evicted its whole worker
    restarts, so the next one may go when all are ready again.
    """
    marks = workload_selector(workload)
    role = marks.pop(ROLE)
    roles = {"key": ROLE, "operator": "In", "values": [role, FOLLOWER_OF[role]]}
    return {
        "minAvailable": (num_workers + 1) * num_pods - 1,
        "selector": {"matchLabels": marks, "matchExpressions": [roles]},
    }


def workers_of_budget(min_available: int, num_pods: int) -> int:
    """The inverse: workers, from a bound in pods."""
    return (min_available + 1) // num_pods - 1
