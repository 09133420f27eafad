"""A worker of several pods: its two StatefulSets, their pods, and what belongs to them."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from pdcluster_api.manifests.groups import DEFAULT_CONTAINER, GroupRun, workers_of_budget
from pdcluster_api.manifests.render import Manifest, render_shared, render_workload
from pdcluster_schema.revision import revision_of
from pdcluster_schema.stock_engine import GROUP_VARIABLES
from pdcluster_schema.workload import GroupId, WorkloadId
from tests.operator.pdcluster_api.manifests.rendering import (
    OWNER,
    SITE,
    by_name,
    cluster_of,
    engine_of,
    matches,
    record_of,
    workload_of,
)
from tests.schema.object_cases import CPU, Change, at, both, sglang, vllm

POOL = "spec.roles.decode.pools.0"
TWO = both(at(f"{POOL}.podsPerReplica", 2), at("spec.roles.decode.engine", {"dataParallelSize": 2}))
STOCK = both(
    vllm(),
    at("spec.engine.tensorParallelSize", 16),
    *(
        both(at(f"{pool}.gpu", "B200"), at(f"{pool}.podsPerReplica", 2))
        for pool in (POOL, "spec.roles.prefill.pools.0")
    ),
)


def sets_of(*changes: Change, replicas: int = 1, **more: Any) -> dict[str, Manifest]:
    """StatefulSets of the decode workload, by what follows its name."""
    *sets, config = render_workload(record_of(*changes), replicas, OWNER, **more)
    name = config["metadata"]["name"]
    return {each["metadata"]["name"].removeprefix(name): each for each in sets}


def workload(*changes: Change) -> WorkloadId:
    return workload_of(cluster_of(*changes))


def pod(stateful_set: Manifest) -> Manifest:
    template: Manifest = stateful_set["spec"]["template"]
    return template


def variables(container: Manifest) -> dict[str, Any]:
    return {
        name: each.get("value") or each["valueFrom"]["fieldRef"]["fieldPath"]
        for name, each in by_name(container["env"]).items()
    }


def test_each_worker_has_a_set_of_its_leader_and_one_of_its_followers() -> None:
    sets = sets_of(TWO, replicas=2)
    assert {name: each["spec"]["replicas"] for name, each in sets.items()} == {
        "-0": 1,
        "-0-f": 1,
        "-1": 1,
        "-1-f": 1,
    }
    followers = sets["-1-f"]
    assert followers["spec"]["ordinals"] == {"start": 1}
    assert followers["spec"]["podManagementPolicy"] == "Parallel"
    for each in sets.values():
        marks, selected = pod(each)["metadata"]["labels"], each["spec"]["selector"]
        others = [pod(other)["metadata"]["labels"] for other in sets.values() if other is not each]
        assert matches(selected, marks)
        assert not any(matches(selected, other) for other in others)
        assert each["metadata"]["labels"]["pdcluster.io/worker"] == marks["pdcluster.io/worker"]
        assert each["metadata"]["annotations"] == {"pdcluster.io/pods-per-replica": "2"}


def test_a_worker_that_restarts_has_no_pods() -> None:
    notes = {"pdcluster.io/group-restart": "{}"}
    runs = {GroupId(workload(TWO), 1): GroupRun(is_stopped=True, notes=notes)}
    sets = sets_of(TWO, replicas=2, runs=runs)
    assert [each["spec"]["replicas"] for each in sets.values()] == [1, 1, 0, 0]
    found = [each["metadata"]["annotations"] for each in sets.values()]
    assert [each.get("pdcluster.io/group-restart") for each in found] == [None, None, "{}", "{}"]


def test_services_lead_to_leaders_and_fences_hold_for_followers_too() -> None:
    cluster = cluster_of(TWO)
    leader, follower = (pod(each)["metadata"]["labels"] for each in sets_of(TWO).values())
    budgets = {workload(TWO): 2}
    shared = render_shared(
        cluster, OWNER, SITE, revision_of(cluster.spec), records=[record_of(TWO)], budgets=budgets
    )
    found = {
        (each["kind"], each["metadata"]["name"]): each["spec"]
        for each in shared[1:]
        if "spec" in each
    }
    ingress = found["Service", "chat"]["selector"]
    names = found["Service", "chat-workers"]["selector"]
    policy = found["NetworkPolicy", "chat-pdc"]
    budget = found["PodDisruptionBudget", workload(TWO).name]
    assert matches({"matchLabels": ingress}, leader)
    assert not matches({"matchLabels": ingress}, follower)
    for marks in (leader, follower):
        assert matches({"matchLabels": names}, marks)
        assert matches(policy["podSelector"], marks)
        assert matches(budget["selector"], marks)
    assert {"port": 9001, "protocol": "TCP"} in policy["ingress"][1]["ports"]
    # of three workers, the two that have to stay, and one pod may go of the third
    assert budget["minAvailable"] == 5


@pytest.mark.parametrize("num_workers", range(4))
@pytest.mark.parametrize("num_pods", [1, 2, 5])
def test_a_budget_is_read_as_it_was_written(num_workers: int, num_pods: int) -> None:
    assert workers_of_budget((num_workers + 1) * num_pods - 1, num_pods) == num_workers


def test_every_container_has_the_variables_of_leader_worker_set() -> None:
    for name, stateful_set in sets_of(TWO).items():
        found = variables(pod(stateful_set)["spec"]["containers"][0])
        assert {key: found[key] for key in found if key.startswith(("LWS", "PDC"))} == {
            "PDCLUSTER_WORKER": "metadata.labels['pdcluster.io/worker']",
            "LWS_WORKER_INDEX": "metadata.labels['apps.kubernetes.io/pod-index']",
            "LWS_LEADER_ADDRESS": "$(PDCLUSTER_WORKER)-0.chat-workers.serving.svc",
            "LWS_GROUP_SIZE": "2",
            "PDCLUSTER_GRACE_SECONDS": "295",
        }, name
        assert set(GROUP_VARIABLES) == found.keys() & {*GROUP_VARIABLES}


def test_engines_of_ours_join_the_leader() -> None:
    leader, follower = (
        by_name(pod(each)["spec"]["containers"])["worker"] for each in sets_of(TWO).values()
    )
    assert follower["command"] == [
        *leader["command"],
        "--headless",
        "--head",
        "$(LWS_LEADER_ADDRESS):9001",
        "--join-seconds",
        "3600",
    ]
    assert follower["startupProbe"]["tcpSocket"] == {"port": 9100}
    assert "livenessProbe" not in follower
    engine = engine_of(TWO)
    assert engine["listen"] == {"head": 9001, "headless": 1}
    assert "dataParallelSize" not in engine["engine"]  # one engine in each pod


def test_ranks_of_a_stock_engine_are_divided_among_the_pods() -> None:
    leader, follower = sets_of(STOCK).values()
    led = by_name(pod(leader)["spec"]["initContainers"])["engine"]
    following = by_name(pod(follower)["spec"]["containers"])["engine"]
    tail = led["command"][-8:]
    assert tail == [
        *("--nnodes", "2", "--node-rank", "$(LWS_WORKER_INDEX)"),
        *("--master-addr", "$(LWS_LEADER_ADDRESS)", "--master-port", "29501"),
    ]
    assert following["command"] == [*led["command"], "--headless"]
    assert "restartPolicy" not in following
    assert [each["name"] for each in pod(follower)["spec"]["containers"]] == ["engine"]
    template = pod(follower)
    assert template["metadata"]["annotations"][DEFAULT_CONTAINER] == "engine"
    mounts = {each["name"] for each in following["volumeMounts"]}
    assert {each["name"] for each in template["spec"]["volumes"]} == mounts
    assert "tls" in {each["name"] for each in pod(leader)["spec"]["volumes"]} - mounts
    # it ends by SIGTERM while it loads, too: a first process would not get it
    assert pod(follower)["spec"]["shareProcessNamespace"] is True
    assert "shareProcessNamespace" not in pod(leader)["spec"]
    for engine in (led, following):
        assert engine["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        assert set(variables(engine)) >= {"LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS", "POD_IP"}


def test_ranks_of_sglang_find_each_other_at_the_leader() -> None:
    pool = {**CPU, "gpu": "H100", "podsPerReplica": 2}
    change = both(sglang(tensorParallelSize=16), at("spec.roles", {"mixed": {"pools": [pool]}}))
    leader, follower, _ = render_workload(record_of(change, role="mixed"), 1, OWNER)
    led = by_name(pod(leader)["spec"]["initContainers"])["engine"]
    following = by_name(pod(follower)["spec"]["containers"])["engine"]
    assert led["command"][-6:] == [
        *("--nnodes", "2", "--node-rank", "$(LWS_WORKER_INDEX)"),
        *("--dist-init-addr", "$(LWS_LEADER_ADDRESS):29501"),
    ]
    assert following["command"] == led["command"]
    assert following["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_data_parallel_ranks_of_a_stock_engine_answer_and_tell_of_their_caches_at_the_leader() -> (
    None
):
    ranks = both(
        at("spec.engine.tensorParallelSize", 4),
        at("spec.engine.dataParallelSize", 4),
        at("spec.engine.numBlocks", 100),
        at("spec.engine.threads", 8),
    )
    leader, follower = sets_of(STOCK, ranks).values()
    led = by_name(pod(leader)["spec"]["initContainers"])["engine"]
    following = by_name(pod(follower)["spec"]["containers"])["engine"]
    line = led["command"]
    assert following["command"] == [*line, "--api-server-count", "0", "--headless"]
    given = {flag: line[line.index(flag) + 1] for flag in line if flag.startswith("--")}
    events = json.loads(given["--kv-events-config"])
    assert events["endpoint"] == "tcp://$(LWS_LEADER_ADDRESS):8101"
    assert given["--data-parallel-size"] == "4"
    assert given["--nnodes"] == "2"
    # of a pod's two ranks each has half of what a pod has
    assert given["--num-gpu-blocks-override"] == "50"
    assert variables(led)["OMP_NUM_THREADS"] == "4"
    assert engine_of(STOCK, ranks)["engine"]["vllm"]["eventsFromPods"] is True


@pytest.mark.parametrize("change", [TWO, STOCK])
def test_followers_outlive_the_requests_of_their_leader(change: Change) -> None:
    """The hook's program waits while the leader's port is open, and ends when it is closed."""
    _, follower = sets_of(change).values()
    (container,) = pod(follower)["spec"]["containers"]
    _, *program = container["lifecycle"]["preStop"]["exec"]["command"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, *(word.replace("8000", str(port)) for word in program)],
            env={**os.environ, "LWS_LEADER_ADDRESS": "127.0.0.1"},
        )
        for _ in range(2):
            server.accept()[0].close()
        assert process.poll() is None
    assert process.wait(30) == 0


@pytest.mark.parametrize("change", [TWO, STOCK])
@pytest.mark.parametrize(("answer", "status"), [(b"200 OK", 0), (b"503 No", 1), (b"", 1)])
def test_followers_are_ready_when_their_leader_is(
    change: Change, answer: bytes, status: int
) -> None:
    _, follower = sets_of(change).values()
    (container,) = pod(follower)["spec"]["containers"]
    _, *program = container["readinessProbe"]["exec"]["command"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, *(word.replace("8000", str(port)) for word in program)],
            env={**os.environ, "LWS_LEADER_ADDRESS": "127.0.0.1"},
        )
        leader, _ = server.accept()
        with leader:
            assert leader.recv(100).startswith(b"GET /ready HTTP/1.0\r\n")
            leader.sendall(b"HTTP/1.1 " + answer if answer else b"")
        assert process.wait(30) == status


def test_single_pods_follow_no_pod_of_a_worker_of_several() -> None:
    placed = at("spec.placement", {"domainLabel": "rack", "mode": "Required"})
    (single,) = sets_of(placed).values()
    affinity = pod(single)["spec"]["affinity"]["podAffinity"]
    ((term,),) = affinity.values()
    group = pod(sets_of(TWO, placed)["-0"])["metadata"]["labels"]
    revision = term["labelSelector"]["matchLabels"]["pdcluster.io/revision"]
    assert matches(term["labelSelector"], pod(single)["metadata"]["labels"])
    assert not matches(term["labelSelector"], {**group, "pdcluster.io/revision": revision})


def test_pods_follow_from_the_accelerators_of_one() -> None:
    gb200 = both(
        vllm(),
        at("spec.engine.tensorParallelSize", 8),
        at(f"{POOL}.gpu", "GB200"),
        at(f"{POOL}.gpusPerPod", 4),
    )
    sets = sets_of(gb200)
    assert [each["spec"]["replicas"] for each in sets.values()] == [1, 1]
    assert sets_of(gb200, at("spec.engine.tensorParallelSize", 4)).keys() == {""}


@pytest.mark.parametrize("mode", ["Preferred", "Required", "Exclusive"])
def test_a_worker_is_placed_in_one_domain(mode: str) -> None:
    placed = at("spec.placement", {"domainLabel": "rack", "mode": mode})
    for each in sets_of(TWO, placed).values():
        affinity = pod(each)["spec"]["affinity"]
        own = {
            "labelSelector": {
                "matchLabels": {"pdcluster.io/worker": f"{workload(TWO, placed).name}-0"}
            },
            "topologyKey": "rack",
        }
        if mode == "Preferred":
            term = {"weight": 100, "podAffinityTerm": own}
            assert affinity["podAffinity"] == {
                "preferredDuringSchedulingIgnoredDuringExecution": [term]
            }
        else:
            assert affinity["podAffinity"] == {
                "requiredDuringSchedulingIgnoredDuringExecution": [own]
            }
        assert ("podAntiAffinity" in affinity) == (mode == "Exclusive")


@pytest.mark.parametrize(
    ("gang", "api_version", "spec", "joined", "scheduler"),
    [
        (
            {"gang": "PodGroup"},
            "scheduling.x-k8s.io/v1alpha1",
            {"minMember": 2},
            ("labels", "scheduling.x-k8s.io/pod-group"),
            None,
        ),
        (
            {"gang": "Volcano", "queue": "gpus"},
            "scheduling.volcano.sh/v1beta1",
            {"minMember": 2, "queue": "gpus"},
            ("annotations", "scheduling.k8s.io/group-name"),
            "volcano",
        ),
    ],
)
def test_all_pods_of_a_worker_are_scheduled_as_one(
    gang: dict[str, str],
    api_version: str,
    spec: dict[str, Any],
    joined: tuple[str, str],
    scheduler: str | None,
) -> None:
    placed = at("spec.placement", gang)
    *objects, config = render_workload(record_of(TWO, placed), 2, OWNER)
    groups = [each for each in objects if each["kind"] == "PodGroup"]
    names = [each["metadata"]["name"] for each in groups]
    assert names == [f"{config['metadata']['name']}-{index}" for index in (0, 1)]
    for group in groups:
        assert (group["apiVersion"], group["spec"]) == (api_version, spec)
        assert group["metadata"]["ownerReferences"][0]["uid"] == OWNER.uid
    sets = [each for each in objects if each["kind"] == "StatefulSet"]
    field, key = joined
    assert [pod(each)["metadata"][field][key] for each in sets] == [n for n in names for _ in "ab"]
    assert {pod(each)["spec"].get("schedulerName") for each in sets} == {scheduler}
    assert not any(key in str(each["spec"]["selector"]) for each in sets)

    ranked = both(placed, at("spec.roles.decode.podTemplate.spec.priorityClassName", "high"))
    group, *_ = render_workload(record_of(TWO, ranked), 1, OWNER)
    priority = {"priorityClassName": "high"} if scheduler == "volcano" else {}
    assert group["spec"] == {**spec, **priority}

    alone = both(placed, at("spec.roles.decode.podTemplate.spec.schedulerName", "mine"))
    found = {
        pod(each)["spec"]["schedulerName"]
        for name, each in sets_of(TWO, alone).items()
        if each["kind"] == "StatefulSet"
    }
    assert found == {"mine"}
    single = render_workload(record_of(TWO, placed, role="prefill"), 1, OWNER)
    assert "PodGroup" not in {each["kind"] for each in single}


def test_a_users_template_reaches_both_kinds_of_pods() -> None:
    template = {
        "spec": {
            "runtimeClassName": "nvidia",
            "initContainers": [
                {"name": "engine", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}
            ],
        }
    }
    leader, follower = sets_of(STOCK, at("spec.podTemplate", template)).values()
    assert pod(leader)["spec"]["runtimeClassName"] == pod(follower)["spec"]["runtimeClassName"]
    assert variables(by_name(pod(follower)["spec"]["containers"])["engine"])["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize(
    ("change", "containers", "container"),
    [
        (TWO, "containers", {"name": "worker", "startupProbe": None, "command": None}),
        (STOCK, "initContainers", {"name": "engine", "command": None}),
    ],
)
def test_a_template_that_leaves_the_command_to_the_image_gives_followers_arguments(
    change: Change, containers: str, container: dict[str, Any]
) -> None:
    template = {"spec": {containers: [container]}}
    follower = sets_of(change, at("spec.roles.decode.podTemplate", template))["-0-f"]

    (found,) = pod(follower)["spec"]["containers"]
    assert "command" not in found
    assert "--headless" in found["args"]


def test_followers_have_each_volume_that_a_container_uses_and_those_without_a_name() -> None:
    names = ("mounted", "device", "unused")
    volumes = [*({"name": each, "emptyDir": {}} for each in names), {"emptyDir": {}}]
    worker = {
        "name": "worker",
        "volumeMounts": [{"name": "mounted", "mountPath": "/m"}, {"mountPath": "/x"}],
        "volumeDevices": [{"name": "device", "devicePath": "/d"}, {"devicePath": "/y"}],
    }
    template = {"spec": {"volumes": volumes, "containers": [worker]}}
    follower = sets_of(TWO, at("spec.roles.decode.podTemplate", template))["-0-f"]

    found = [each.get("name") for each in pod(follower)["spec"]["volumes"]]
    assert [each for each in found if each in (*names, None)] == ["mounted", "device", None]
