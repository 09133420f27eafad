"""A stock vLLM on a cluster: examples/vllm.yaml, one prefill and one decode worker, KV by NIXL on
CPUs.

An image of several GB and minutes for each start, so only where PDCLUSTER_E2E_VLLM is set.
Every answer is compared with the greedy one of its prompt (`greedy`).
"""

import json
import time
from collections.abc import Callable, Iterator

import pytest

from e2e.client_program import Stories
from e2e.greedy import Greedy
from e2e.harness import LOOK_SECONDS, NAME, Json, Kubernetes, ready, wait_for_workers
from e2e.rig.paths import HAS_STOCK_ENGINE, STOCK_SWITCH
from e2e.stock import (
    DECODE,
    PREFILL,
    START_SECONDS,
    assert_greedy,
    changed,
    condition,
    elapsed,
    kill_engine,
    only_pod,
    restarts,
    status_of,
    stock_example,
    wait_for_condition,
    wait_gone,
    wait_left,
)
from e2e.streams import cut, streams
from tests.system.waiting import wait_for

pytestmark = pytest.mark.skipif(
    not HAS_STOCK_ENGINE,
    reason=f"vLLM in a cluster takes 20 GB of disk and half an hour: set {STOCK_SWITCH}=1",
)

STREAM_SECONDS = 300.0
VERIFY_SECONDS = 180.0
BEGIN_SECONDS = 60.0


@pytest.fixture
def stock(operator: Kubernetes, note: Callable[[str], None]) -> Kubernetes:
    """The cluster with both workers ready and a client pod."""
    since = time.monotonic()
    operator.kubectl("apply", "--filename=-", stdin=json.dumps(stock_example(operator)))
    operator.start_client()
    is_new = not operator.is_ready()
    wait_for_workers(operator, prefill=1, decode=1, seconds=START_SECONDS)
    if is_new:
        note(f"one worker of each role was ready after {elapsed(since)}")
    return operator


def answered(
    cluster: Kubernetes, greedy: Greedy, *, first: int, prefill: str = "remote", count: int = 2
) -> str:
    """Have new prompts prefilled there, and check every token; returns the figures."""
    stories = Stories(
        count=count, clients=1, max_tokens=16, words=120, first=first, prefill=(prefill,)
    )
    with streams(cluster, stories) as running:
        answers = running.wait_ended(STREAM_SECONDS)
    said = assert_greedy(answers, running, greedy)
    assert {answer["prefill"] for answer in answers} == {prefill}
    return said


def test_both_pods_are_ready_with_the_engine_as_a_sidecar(stock: Kubernetes) -> None:
    pods = [only_pod(stock, role) for role in (PREFILL, DECODE)]

    for pod in pods:
        (engine,) = pod["spec"]["initContainers"]
        assert (engine["name"], engine["restartPolicy"]) == ("engine", "Always")
        assert engine["image"] == stock.images["vllm"]
        assert {name: status_of(pod, name)["ready"] for name in ("engine", "worker")} == {
            "engine": True,
            "worker": True,
        }
    assert condition(stock, "Serving")["status"] == "True"
    # there are no accelerators here
    assert condition(stock, "AcceleratorsInUse") == {}


def test_transfer_is_verified_and_says_what_moved(
    stock: Kubernetes, note: Callable[[str], None]
) -> None:
    found = wait_for_condition(
        stock, "KVTransferVerified", {"status": "True"}, seconds=VERIFY_SECONDS
    )

    (pair,) = stock.get(f"pdc/{NAME}")["status"]["transfers"]["pairs"]
    note(f"{found['message']}; {pair}")
    assert found["reason"] == "KVMoved"
    assert "nixl" in found["message"]


def test_remote_and_local_prefills_give_the_greedy_tokens(
    stock: Kubernetes, greedy: Greedy, note: Callable[[str], None]
) -> None:
    stories = [
        Stories(count=4, clients=2, max_tokens=24, words=words, first=100, prefill=(prefill,))
        for words in (8, 300)
        for prefill in ("local", "remote")
    ]
    for each in stories:
        with streams(stock, each) as running:
            answers = running.wait_ended(STREAM_SECONDS)
        note(f"{each.words} words, {each.prefill[0]}: {assert_greedy(answers, running, greedy)}")
        assert {answer["prefill"] for answer in answers} == set(each.prefill)
    assert condition(stock, "Disaggregating")["status"] in ("True", "Unknown")


@pytest.mark.parametrize("role", [DECODE, PREFILL])
def test_stopped_pod_finishes_its_streams(
    stock: Kubernetes, greedy: Greedy, note: Callable[[str], None], role: str
) -> None:
    first, tokens = (200, 200) if role == DECODE else (220, 4)
    stories = Stories(
        count=3, clients=3, max_tokens=tokens, words=300, first=first, prefill=("remote",)
    )
    leaving = only_pod(stock, role)
    with streams(stock, stories) as running:
        running.wait_begun(1, BEGIN_SECONDS)
        num_open = running.num_open
        stock.kubectl("delete", "pod", leaving["metadata"]["name"], "--wait=false")
        answers = running.wait_ended(STREAM_SECONDS)
        since = time.monotonic()
        wait_left(stock, leaving)
        wait_for_workers(stock, prefill=1, decode=1, seconds=START_SECONDS)

    assert num_open > 0
    figures = assert_greedy(answers, running, greedy)
    note(f"{figures}; {num_open} open at the delete; its successor came after {elapsed(since)}")
    assert only_pod(stock, role)["metadata"]["uid"] != leaving["metadata"]["uid"]
    note(answered(stock, greedy, first=first + 50))


def test_prefill_pod_killed_in_the_middle_costs_no_answer(
    stock: Kubernetes, greedy: Greedy, note: Callable[[str], None]
) -> None:
    stories = Stories(count=6, clients=6, max_tokens=16, words=700, first=300)
    killed = only_pod(stock, PREFILL)
    with streams(stock, stories) as running:
        running.wait_begun(1, BEGIN_SECONDS)
        num_begun = len(running.begun)
        name = killed["metadata"]["name"]
        stock.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--wait=false")
        answers = running.wait_ended(STREAM_SECONDS)

    assert num_begun < stories.count
    note(f"{assert_greedy(answers, running, greedy)}; {num_begun} had begun at the kill")
    wait_for_workers(stock, prefill=1, decode=1, seconds=START_SECONDS)
    successor = only_pod(stock, PREFILL)
    assert successor["metadata"]["name"] == name
    assert successor["metadata"]["uid"] != killed["metadata"]["uid"]
    note(answered(stock, greedy, first=350))


def test_prefill_engine_killed_in_the_middle_is_a_new_peer_at_its_address(
    stock: Kubernetes, greedy: Greedy, note: Callable[[str], None]
) -> None:
    """Its container starts again in the same pod: the same address and ports, another engine."""
    stories = Stories(count=6, clients=6, max_tokens=16, words=700, first=400)
    pod, decode = only_pod(stock, PREFILL), only_pod(stock, DECODE)
    with streams(stock, stories) as running:
        running.wait_begun(1, BEGIN_SECONDS)
        num_begun, since = len(running.begun), time.monotonic()
        kill_engine(stock, pod)
        answers = running.wait_ended(STREAM_SECONDS)

    assert num_begun < stories.count
    figures = assert_greedy(answers, running, greedy)
    wait_restarted(stock, pod, PREFILL)
    note(f"{figures}; {num_begun} had begun; ready again after {elapsed(since)}")
    again = only_pod(stock, PREFILL)
    assert again["status"]["podIP"] == pod["status"]["podIP"]
    note(answered(stock, greedy, first=450))
    # the survivor was never restarted for it
    assert [restarts(only_pod(stock, DECODE), each) for each in ("engine", "worker")] == [
        restarts(decode, each) for each in ("engine", "worker")
    ]


def test_engine_that_dies_ends_its_stream_and_is_restarted(
    stock: Kubernetes, greedy: Greedy, note: Callable[[str], None]
) -> None:
    stories = Stories(count=1, clients=1, max_tokens=1000, words=20, first=500, prefill=("local",))
    pod = only_pod(stock, DECODE)
    with streams(stock, stories) as running:
        running.wait_begun(1, BEGIN_SECONDS)
        since = time.monotonic()
        kill_engine(stock, pod)
        (answer,) = running.wait_ended(BEGIN_SECONDS)
        ended = elapsed(since)

    assert (answer["done"], len(answer["tokens"]) < 1000) == (False, True)
    assert answer["error"], answer
    wait_restarted(stock, pod, DECODE)
    note(
        f"stream ended {ended} after the kill with {answer['error']}, "
        f"ready again after {elapsed(since)}"
    )
    note(answered(stock, greedy, first=550))


def wait_restarted(cluster: Kubernetes, before: Json, role: str) -> None:
    """Wait until a pod was not ready, its engine was started again, and all is ready and
    reached by the Service, which a node learns a moment after the pod is ready.
    """
    uid = before["metadata"]["uid"]

    def is_restarted() -> bool:
        found = only_pod(cluster, role)
        assert found["metadata"]["uid"] == uid
        return bool(ready([found])) and restarts(found, "engine") > restarts(before, "engine")

    wait_for(
        is_restarted,
        START_SECONDS,
        lambda: cluster.kubectl("get", "pods,pdc"),
        poll_seconds=LOOK_SECONDS,
    )
    assert ready_since(only_pod(cluster, role)) != ready_since(before), "it was ready all the time"
    wait_for_workers(cluster, prefill=1, decode=1, seconds=START_SECONDS)
    wait_for(
        lambda: cluster.ask("get", f"http://{NAME}:8000/health")[0]["status"] == 200,
        BEGIN_SECONDS,
        lambda: str(cluster.ask("get", f"http://{NAME}:8000/health")),
        poll_seconds=LOOK_SECONDS,
    )


def ready_since(pod: Json) -> str:
    """Time when the pod became ready, in whole seconds."""
    (found,) = (each for each in pod["status"]["conditions"] if each["type"] == "Ready")
    return str(found["lastTransitionTime"])


AUTOSCALE: Json = {
    "mode": "On",
    "intervalSeconds": 5,
    "prefill": {"queueUp": 2, "queueDown": 1},
    "decode": {"queueUp": 100, "queueDown": 1},
    "scaleDown": {"windowSeconds": 30},
}


@pytest.fixture
def scaled(stock: Kubernetes) -> Iterator[Kubernetes]:
    """The cluster with a prefill pool that may grow; at the end it is as it was."""
    found = stock_example(stock)
    found["spec"]["autoscale"] = AUTOSCALE
    for role, most in (("prefill", 2), ("decode", 1)):
        found["spec"]["roles"][role]["pools"] = [
            {"name": "cpu", "gpu": "cpu", "replicas": 1, "minReplicas": 1, "maxReplicas": most}
        ]
    stock.replace(found["spec"])
    yield stock
    stock.replace(stock_example(stock)["spec"])


def test_prefill_pool_grows_by_the_metrics_of_its_engines(
    scaled: Kubernetes, greedy: Greedy, note: Callable[[str], None]
) -> None:
    stories = Stories(count=1000, clients=8, max_tokens=2, words=900, seconds=240, first=6000)
    since = time.monotonic()
    with streams(scaled, stories) as running:
        wait_for(
            lambda: len(ready(scaled.pods(PREFILL))) == 2,
            START_SECONDS,
            lambda: scaled.kubectl("get", "pods,pdc"),
            poll_seconds=LOOK_SECONDS,
        )
        note(f"two prefill workers were ready after {elapsed(since)}")
        answers = running.wait_ended(STREAM_SECONDS)

    assert cut(answers, stories) == []
    greedy.check(answers, stories.words)
    note(f"{len(answers)} long prompts answered")
    # and back, with nothing lost
    wait_for_workers(scaled, prefill=1, decode=1, seconds=START_SECONDS)


WRONG: dict[str, tuple[Json, str, list[str]]] = {
    "image": (
        {"image": "localhost/no-such-vllm:v0.32.0"},
        "ImageNotPulled",
        ["localhost/no-such-vllm:v0.32.0", "spec.engine.image"],
    ),
    "flag": ({"args": ["--no-such-flag"]}, "ConfigurationRefused", ["--no-such-flag"]),
    "load": ({"maxModelLen": 99999}, "CrashLooping", ["max_model_len", "99999"]),
}


@pytest.fixture
def alone(operator: Kubernetes) -> Iterator[Kubernetes]:
    """The cluster without any worker, before and after."""
    operator.kubectl("delete", f"pdc/{NAME}", "--ignore-not-found")
    wait_gone(operator)
    yield operator
    operator.kubectl("delete", f"pdc/{NAME}", "--ignore-not-found")
    wait_gone(operator)


@pytest.mark.parametrize("case", WRONG)
def test_engine_that_cannot_start_says_why(
    alone: Kubernetes, case: str, note: Callable[[str], None]
) -> None:
    engine, reason, words = WRONG[case]
    found = changed(stock_example(alone), **engine)
    alone.kubectl("apply", "--filename=-", stdin=json.dumps(found))

    told = wait_for_condition(alone, "Ready", {"reason": reason})

    note(told["message"])
    assert all(word in told["message"] for word in words), told
