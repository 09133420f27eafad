"""A picker behind a real Envoy in the cluster: it spreads prompts, keeps those that begin alike at
one worker, sends nothing to a worker that drains, and has Envoy answer 503 while there is none.

Envoy's binary is the one that `bench/peers/install_envoy.sh` installs on this machine.
"""

import json
from collections.abc import Iterator

import pytest
import yaml

from e2e.client_program import Stories
from e2e.greedy import Greedy
from e2e.harness import (
    FLEET_ENGINE,
    LOOK_SECONDS,
    NAME,
    Json,
    Kubernetes,
    example,
    wait_for_workers,
)
from e2e.rig.paths import REPOSITORY
from e2e.streams import cut, metric, streams
from tests.system.envoy import FOLDER, envoy_config
from tests.system.waiting import wait_for

ENVOY = "e2e-envoy"
PORT = 8080
DEFINITION = REPOSITORY / "tests/apiserver/inferencepool.yaml"
POLICY = {
    "relaying": {"policy": "textPrefix", "prefixBytes": 256},
    # a picker takes a request for open for a time after its choice: fast ones in a row would spread
    "decodeScore": {"hotspotPrevention": False},
}
BEGIN_SECONDS, STREAM_SECONDS = 120.0, 300.0

pytestmark = pytest.mark.skipif(
    not (FOLDER / ".ready").is_file(), reason=f"run bench/peers/install_envoy.sh {FOLDER}"
)


@pytest.fixture(scope="module")
def stage(cluster: Kubernetes) -> Iterator[Kubernetes]:
    """One prefill and two decode workers in float32, a picker, Envoy and a client pod."""
    if cluster.rig is None:
        pytest.skip("mounts Envoy from this machine, which is a node of the rig alone")
    cluster.install_operator()
    cluster.kubectl("delete", f"pdc/{NAME}", "--ignore-not-found", "--wait")
    cluster.kubectl("apply", f"--filename={DEFINITION}")
    cluster.kubectl("apply", "--filename=-", stdin=json.dumps(body()))
    cluster.start_client()
    wait_for_workers(cluster, prefill=1, decode=2, picker=1)
    start_envoy(cluster)
    yield cluster
    cluster.kubectl("delete", f"pdc/{NAME}", f"pod/{ENVOY}", f"configmap/{ENVOY}", "--wait")
    cluster.kubectl("delete", f"--filename={DEFINITION}")


@pytest.fixture
def picked(stage: Kubernetes) -> Kubernetes:
    stage.scale(prefill=1, decode=2)
    wait_for_workers(stage, prefill=1, decode=2, picker=1)
    wait_for_endpoints(stage, 2)
    return stage


def body() -> Json:
    found = example()
    spec = found["spec"]
    spec["model"]["dtype"], spec["engine"] = "float32", FLEET_ENGINE
    spec["roles"]["picker"] = {"pools": [{"name": "cpu", "replicas": 1}]}
    spec["roles"]["decode"]["pools"][0]["replicas"] = 2
    spec["service"]["endpointPicker"] = {}
    spec["routing"] |= POLICY
    return found


def start_envoy(cluster: Kubernetes) -> None:
    """A pod of the client's image, with Envoy from this machine."""
    address = cluster.get(f"service/{NAME}-picker")["spec"]["clusterIP"]
    config = yaml.safe_dump(envoy_config(f"0.0.0.0:{PORT}", f"{address}:9002"))
    client = cluster.get("pod/e2e-client")["spec"]["containers"][0]
    container = {
        "name": "envoy",
        "image": client["image"],
        "imagePullPolicy": "IfNotPresent",
        "command": ["/envoy/envoy", "-c", "/config/envoy.yaml", "--concurrency", "1"],
        "args": ["--disable-hot-restart", "-l", "warning"],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": [
            {"name": "envoy", "mountPath": "/envoy", "readOnly": True},
            {"name": "config", "mountPath": "/config"},
        ],
        "resources": {"requests": {"cpu": "50m"}},
    }
    (folder,) = FOLDER.glob("lib/python3*/site-packages/envoy/_bin")
    volumes = [
        {"name": "envoy", "hostPath": {"path": str(folder), "type": "Directory"}},
        {"name": "config", "configMap": {"name": ENVOY}},
    ]
    spec = {
        "containers": [container],
        "volumes": volumes,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
    }
    names = {"apiVersion": "v1", "metadata": {"name": ENVOY}}
    objects = [
        {**names, "kind": "ConfigMap", "data": {"envoy.yaml": config}},
        {**names, "kind": "Pod", "spec": spec},
    ]
    cluster.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(objects))
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{ENVOY}", "--timeout=120s")


def url(cluster: Kubernetes) -> str:
    return f"http://{cluster.get(f'pod/{ENVOY}')['status']['podIP']}:{PORT}"


def wait_for_endpoints(cluster: Kubernetes, number: int) -> None:
    (picker,) = cluster.pods("pdcluster.io/role=picker")
    wait_for(
        lambda: metric(cluster, picker, "pdcluster_picker_endpoints") == number,
        BEGIN_SECONDS,
        lambda: cluster.kubectl("get", "pods,pdc"),
        poll_seconds=LOOK_SECONDS,
    )


def taken(cluster: Kubernetes, pods: list[Json]) -> list[float]:
    """Requests of clients that each of these workers has begun to answer."""
    name = "pdcluster_time_to_first_token_seconds_count"
    return [metric(cluster, pod, name) for pod in pods]


def decodes(cluster: Kubernetes) -> list[Json]:
    """By name: a scale-down takes the last."""
    pods = cluster.pods("pdcluster.io/role=decode")
    return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))


def since(before: list[float], now: list[float]) -> list[float]:
    return [b - a for a, b in zip(before, now, strict=True)]


def test_prompts_are_spread_and_those_that_begin_alike_go_to_one_worker(
    picked: Kubernetes, greedy: Greedy
) -> None:
    pods, stories = decodes(picked), Stories(count=16, clients=4, max_tokens=8, words=24)
    first = taken(picked, pods)

    with streams(picked, stories, url(picked)) as running:
        found = running.wait_ended(STREAM_SECONDS)
    second = taken(picked, pods)
    alike = picked.ask("load", url(picked), 8, 4)

    assert cut(found, stories) == []
    greedy.check(found, stories.words)
    assert sum(since(first, second)) == 16
    assert min(since(first, second)) > 0
    assert all("Paris" in answer["text"] for answer in alike), alike
    assert sorted(since(second, taken(picked, pods))) == [0, 8]


def test_a_worker_that_drains_ends_its_streams_and_gets_no_new_requests(
    picked: Kubernetes, greedy: Greedy
) -> None:
    pods = decodes(picked)
    stories = Stories(count=12, clients=12, max_tokens=500, words=24, first=1000)
    with streams(picked, stories, url(picked)) as running:
        running.wait_begun(12, BEGIN_SECONDS)
        picked.scale(decode=1)
        wait_for_endpoints(picked, 1)
        before = taken(picked, pods)
        new = picked.ask("load", url(picked), 4, 2)
        after, num_open = taken(picked, pods), running.num_open
        found = running.wait_ended(STREAM_SECONDS)

    assert num_open > 0
    assert [answer["status"] for answer in new] == [200] * 4
    assert since(before, after) == [4, 0]
    assert cut(found, stories) == []
    greedy.check(found, stories.words)


def test_without_a_worker_envoy_answers_503_with_retry_after(picked: Kubernetes) -> None:
    picked.scale(decode=0)
    wait_for_endpoints(picked, 0)

    (answer,) = picked.ask("ask", url(picked), "auto")

    assert (answer["status"], answer["retry_after"]) == (503, "2"), answer
    assert json.loads(answer["text"])["error"]["code"] == "no_decode_worker"
