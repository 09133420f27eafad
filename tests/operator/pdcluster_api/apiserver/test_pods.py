"""State of a pod from its body, as kubelet and scheduler write it; problems: tests/golden."""

from typing import Any

import pytest

from pdcluster_api.apiserver.pods import MAX_DETAIL, pod_problem, pod_state
from pdcluster_operator.informer.cache import trim
from pdcluster_schema.labels import workload_labels
from pdcluster_schema.workload import WorkloadId

IMAGE = "example.com/worker:1"
ENGINE_IMAGE = "vllm/vllm-openai:v0.32.0"


def make_pod(
    *,
    worker: Any = None,
    fetch: Any = None,
    engine: Any = None,
    sidecar: Any = None,
    **status: Any,
) -> dict[str, Any]:
    """A pod of chat's decode pool.  worker, fetch, engine, sidecar: container
    statuses without their names.
    """
    entries = {"fetch-model": fetch, "engine": engine, "worker": worker, "sidecar": sidecar}
    first = {"fetch-model", "engine"}
    named = {
        name: {"name": name, "restartCount": 0, **entry}
        for name, entry in entries.items()
        if entry is not None
    }
    return {
        "metadata": {
            "name": "chat-decode-cpu-aaaa-0",
            "labels": workload_labels("chat", "decode", "cpu", "aaaa"),
        },
        "spec": {
            "initContainers": [
                {"name": "fetch-model", "image": IMAGE},
                {"name": "engine", "image": ENGINE_IMAGE},
            ],
            "containers": [{"name": "worker", "image": IMAGE}],
        },
        "status": {
            "phase": "Pending",
            "initContainerStatuses": [entry for name, entry in named.items() if name in first],
            "containerStatuses": [entry for name, entry in named.items() if name not in first],
            **status,
        },
    }


def waiting(reason: str, message: str = "", last: Any = None, restarts: int = 0) -> dict[str, Any]:
    last_state = {} if last is None else {"lastState": {"terminated": last}}
    return {
        "state": {"waiting": {"reason": reason, "message": message}},
        "restartCount": restarts,
        **last_state,
    }


def running(last: Any = None, restarts: int = 0) -> dict[str, Any]:
    last_state = {} if last is None else {"lastState": {"terminated": last}}
    return {
        "state": {"running": {"startedAt": "2026-01-02T03:04:05Z"}},
        "ready": False,
        "restartCount": restarts,
        **last_state,
    }


def ended(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    return {"exitCode": code, "reason": reason, "message": message}


LOG = (
    "2026-01-02 INFO loading\nerror: num_blocks: must be at most 100; lower it\n2026-01-02 INFO "
    "bye\n"
)


def test_a_pod_without_a_status_has_no_problem():
    assert pod_problem({**make_pod(), "status": {}}) is None
    assert pod_problem({key: each for key, each in make_pod().items() if key != "status"}) is None


def test_an_ending_pod_has_no_problem():
    pod = make_pod(worker={"state": {"terminated": ended(2, LOG)}})
    pod["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    state = pod_state(pod)
    assert (state.terminating, state.ready, state.problem) == (True, False, None)


@pytest.mark.parametrize(
    "message",
    ["back-off 10s restarting failed container", "back-off 5m0s restarting failed container"],
)
def test_the_same_failure_always_says_the_same(message):
    """Back-off times and counts would change the status, and write it, all the time."""
    pod = make_pod(
        worker=waiting("CrashLoopBackOff", message, last=ended(1, "no"), restarts=len(message))
    )
    between = make_pod(worker=running(last=ended(1, "no"), restarts=4))
    assert pod_problem(pod) == pod_problem(between)


def test_pulling_and_waiting_to_pull_say_the_same():
    error = "failed to resolve reference: not found"
    backing_off = make_pod(
        worker=waiting(
            "ImagePullBackOff", f'Back-off pulling image "{IMAGE}": ErrImagePull: {error}'
        )
    )
    assert pod_problem(make_pod(worker=waiting("ErrImagePull", error))) == pod_problem(backing_off)


@pytest.mark.parametrize(
    "worker",
    [
        waiting("ErrImagePull", "x" * 5000),
        running(last=ended(1, "1 ERROR " + "x" * 5000), restarts=2),
    ],
)
def test_a_long_foreign_message_is_cut(worker):
    _, message = pod_problem(make_pod(worker=worker))
    assert len(message) < MAX_DETAIL + 250
    assert "..." in message


def test_state_of_a_ready_pod():
    state = pod_state(make_pod(worker=running(), conditions=[{"type": "Ready", "status": "True"}]))
    assert state.workload == WorkloadId("chat", "decode", "cpu", "aaaa")
    assert (state.name, state.ready, state.terminating, state.problem) == (
        "chat-decode-cpu-aaaa-0",
        True,
        False,
        None,
    )


@pytest.mark.parametrize(
    ("containers", "is_started"),
    [
        ({"worker": {**running(), "started": True}}, True),  # it drains, and is not ready any more
        ({"worker": {**running(), "started": False}}, False),
        ({"worker": running()}, False),
        ({"worker": {**waiting("CrashLoopBackOff"), "started": True}}, False),
        ({"sidecar": {**running(), "started": True}}, False),
        ({}, False),
    ],
)
def test_a_worker_has_started_when_it_runs_and_has_been_ready(
    containers: dict[str, Any], is_started: bool
):
    assert pod_state(make_pod(**containers)).started is is_started


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fetch-model", "DownloadingModel"),
        ("fetch-adapter-12", "DownloadingModel"),
        ("fetch-certs", None),
        ("fetch-adapter-x", None),
        ("fetch-model-card", None),
    ],
)
def test_init_containers_of_a_template_are_no_downloads(name: str, reason: str | None):
    pod = make_pod(fetch=running())
    pod["status"]["initContainerStatuses"][0]["name"] = name
    problem = pod_problem(pod)
    assert (problem and problem.reason) == reason


SERVES = {**running(), "started": True}
READY = [{"type": "Ready", "status": "True"}]


def test_an_engine_that_does_not_serve_yet_is_named_with_what_shows_why():
    state = pod_state(make_pod(engine=running(), worker=running()))

    assert state.problem is None
    assert state.loading == (
        "pod chat-decode-cpu-aaaa-0: its engine runs since 2026-01-02T03:04:05Z and does not serve "
        "yet; `kubectl logs chat-decode-cpu-aaaa-0 -c engine` shows what it waits for"
    )


@pytest.mark.parametrize(
    "pod",
    [
        make_pod(worker=running()),
        make_pod(engine=waiting("CrashLoopBackOff", last=ended(1)), worker=running()),
        make_pod(engine=running(), worker=SERVES),
        make_pod(engine=running(), worker=running(), conditions=READY),
    ],
    ids=["of our own", "that does not run", "of a worker that drains", "that serves"],
)
def test_no_other_engine_is_reported_as_loading(pod: Any):
    assert pod_state(pod).loading == ""


MADE, CHANGED, GONE = (f"2026-01-02T03:04:0{second}Z" for second in range(3))


@pytest.mark.parametrize(
    ("ready", "deleted", "since"),
    [
        ({"status": "True", "lastTransitionTime": CHANGED}, {}, None),
        ({"status": "False", "lastTransitionTime": CHANGED}, {}, CHANGED),
        ({"status": "Unknown", "lastTransitionTime": CHANGED}, {}, CHANGED),
        ({"status": "False"}, {}, MADE),
        (None, {}, MADE),  # no kubelet has seen it
        ({"status": "True", "lastTransitionTime": CHANGED}, {"deletionTimestamp": GONE}, GONE),
    ],
)
def test_since_when_a_pod_is_not_ready_or_should_be_gone(
    ready: Any, deleted: dict[str, str], since: str | None
):
    pod = make_pod(conditions=[] if ready is None else [{"type": "Ready", **ready}])
    pod["metadata"] |= {"creationTimestamp": MADE, **deleted}
    assert (
        pod_state(
            trim("Pod", {**pod, "metadata": {**pod["metadata"], "namespace": "default"}})
        ).since
        == since
    )


@pytest.mark.parametrize(
    ("given", "own", "seconds"),
    [
        (None, 120, None),  # it does not end
        (120, 120, None),
        (300, 120, None),
        (30, 120, 25),  # its preStop hook takes five
        (3, 120, 2),  # which a kubelet leaves in any case
        (30, None, None),
    ],
)
def test_an_ending_pod_with_less_time_than_its_template_says(
    given: int | None, own: int | None, seconds: int | None
):
    pod = make_pod()
    if given is not None:
        pod["metadata"] |= {"deletionTimestamp": GONE, "deletionGracePeriodSeconds": given}
    spec = {
        **pod.get("spec", {}),
        **({} if own is None else {"terminationGracePeriodSeconds": own}),
    }
    metadata = {**pod["metadata"], "namespace": "default"}
    found = pod_state(trim("Pod", {**pod, "metadata": metadata, "spec": spec}))
    assert found.grace_seconds == seconds


def test_a_pod_that_is_no_worker_is_refused():
    pod = make_pod()
    pod["metadata"]["labels"] = {"pdcluster.io/cluster": "chat"}
    with pytest.raises(KeyError, match="role"):
        pod_state(pod)
