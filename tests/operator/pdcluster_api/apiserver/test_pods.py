"""State of a pod from its body, as kubelet and scheduler write it -> reason and
message, a table.
"""

from typing import Any

import pytest

from pdcluster_api.apiserver.pods import MAX_DETAIL, pod_problem, pod_state
from pdcluster_operator.informer.cache import trim
from pdcluster_schema import conditions as words
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


def scheduled(status: str, reason: str, message: str = "") -> list[dict[str, Any]]:
    return [{"type": "PodScheduled", "status": status, "reason": reason, "message": message}]


LOG = (
    "2026-01-02 INFO loading\nerror: num_blocks: must be at most 100; lower it\n2026-01-02 INFO "
    "bye\n"
)
ENGINE_GONE = (
    "2026-11-21 16:21:59,865 ERROR pdcluster_worker.server_process engine ended "
    "reason=PermissionError(13, 'Permission denied')\n"
    "2026-11-21 16:21:59,901 INFO uvicorn.error Finished server process [7]\n"
)

NO_FLAG = "usage: vllm serve\nvllm serve: error: unrecognized arguments: --eager\n"
NO_MEMORY = "EngineCore failed to start.\nValueError: No available memory\nWorker died\n"

PROBLEMS = [
    (
        "the worker_records refuses",
        make_pod(worker=waiting("ErrImagePull", 'failed to pull and unpack image "x": not found')),
        words.IMAGE_NOT_PULLED,
        [IMAGE, "not found", "spec.image"],
    ),
    (
        "and Kubernetes waits before it tries again",
        make_pod(
            worker=waiting(
                "ImagePullBackOff",
                f'Back-off pulling image "{IMAGE}": ErrImagePull: failed to pull: not found',
            )
        ),
        words.IMAGE_NOT_PULLED,
        ["(failed to pull: not found)"],
    ),
    (
        "a name that is none",
        make_pod(worker=waiting("InvalidImageName", "bad")),
        words.IMAGE_NOT_PULLED,
        ["not the name of an image"],
    ),
    (
        "never to be pulled",
        make_pod(worker=waiting("ErrImageNeverPull", "")),
        words.IMAGE_NOT_PULLED,
        ["pullPolicy"],
    ),
    (
        "the image of the download",
        make_pod(fetch=waiting("ErrImagePull", "denied")),
        words.IMAGE_NOT_PULLED,
        ["denied"],
    ),
    (
        "the image of a stock engine",
        make_pod(engine=waiting("ErrImagePull", "denied"), worker=running()),
        words.IMAGE_NOT_PULLED,
        [ENGINE_IMAGE, "denied", "check spec.engine.image, and of spec.image pullSecrets"],
    ),
    (
        "a stock engine refuses a flag",
        make_pod(engine=waiting("CrashLoopBackOff", "", ended(2, NO_FLAG), 1), worker=running()),
        words.CONFIGURATION_REFUSED,
        ["the engine refuses its command line: vllm serve: error: unrecognized arguments", "args"],
    ),
    (
        "a stock engine dies again and again, with status 0",
        make_pod(engine={**running(ended(0, NO_MEMORY), 3), "ready": True}, worker=running()),
        words.CRASH_LOOPING,
        ["container engine ends with exit status 0: ValueError: No available memory"],
    ),
    (
        "a stock engine never gets ready",
        make_pod(engine={**running(ended(1, NO_MEMORY), 3), "ready": True}, worker=running()),
        words.CRASH_LOOPING,
        [
            "container engine ends with exit status 1: ValueError: No available memory; `kubectl "
            "logs -p -c engine` shows more"
        ],
    ),
    (
        "a Secret is missing",
        make_pod(worker=waiting("CreateContainerConfigError", 'secret "hub" not found')),
        words.CONFIGURATION_REFUSED,
        ["container worker", 'secret "hub" not found', "make what is missing"],
    ),
    (
        "it cannot be started",
        make_pod(worker=waiting("RunContainerError")),
        words.CONFIGURATION_REFUSED,
        ["RunContainerError"],
    ),
    (
        "the worker has not its device",
        make_pod(
            worker={
                "state": {
                    "terminated": ended(
                        3, f"{LOG}\nerror: pool big asks for cuda, but no CUDA device is visible"
                    )
                }
            }
        ),
        words.ACCELERATOR_UNUSABLE,
        ["has not the device", "pool big asks for cuda, but no CUDA device is visible"],
    ),
    (
        "the worker refuses its settings",
        make_pod(worker={"state": {"terminated": ended(2, LOG)}}),
        words.CONFIGURATION_REFUSED,
        ["num_blocks: must be at most 100; lower it"],
    ),
    (
        "and is started again",
        make_pod(
            worker=waiting("CrashLoopBackOff", "back-off 40s", last=ended(2, LOG), restarts=3)
        ),
        words.CONFIGURATION_REFUSED,
        ["num_blocks"],
    ),
    (
        "and runs for a moment",
        make_pod(worker=running(last=ended(2, LOG), restarts=1)),
        words.CONFIGURATION_REFUSED,
        ["num_blocks"],
    ),
    (
        "it refuses without a word",
        make_pod(worker={"state": {"terminated": ended(2)}}),
        words.CONFIGURATION_REFUSED,
        ["see its log"],
    ),
    (
        "it crashes",
        make_pod(
            worker=waiting(
                "CrashLoopBackOff",
                "back-off 5m0s",
                last=ended(1, "Traceback\nValueError: no"),
                restarts=7,
            )
        ),
        words.CRASH_LOOPING,
        ["exit status 1: ValueError: no", "kubectl logs -p -c worker"],
    ),
    (
        "it crashes again and again",
        make_pod(worker=running(last=ended(1), restarts=2)),
        words.CRASH_LOOPING,
        ["exit status 1"],
    ),
    (
        "it always ends",
        make_pod(worker=waiting("CrashLoopBackOff", last=ended(0, "", "Completed"))),
        words.CRASH_LOOPING,
        ["status 0"],
    ),
    (
        "what it logged last is no reason",
        make_pod(worker=waiting("CrashLoopBackOff", last=ended(1, ENGINE_GONE), restarts=3)),
        words.CRASH_LOOPING,
        [
            "exit status 1: pdcluster_worker.server_process engine ended "
            "reason=PermissionError(13, 'Permission denied');"
        ],
    ),
    (
        "out of memory",
        make_pod(worker=waiting("CrashLoopBackOff", last=ended(137, "", "OOMKilled"), restarts=2)),
        words.CRASH_LOOPING,
        ["more memory than its limit", "kvCacheMemory"],
    ),
    (
        "a container of a template",
        make_pod(sidecar=waiting("CrashLoopBackOff", last=ended(2, "error: bad flag"))),
        words.CRASH_LOOPING,
        ["container sidecar ends with exit status 2: bad flag"],
    ),
    (
        "the model is on its way",
        make_pod(fetch=running()),
        words.DOWNLOADING_MODEL,
        ["kubectl logs -c fetch-model"],
    ),
    (
        "once more, after the network failed",
        make_pod(fetch=running(last=ended(1, "error: reset"), restarts=1)),
        words.DOWNLOADING_MODEL,
        [],
    ),
    (
        "no such repository",
        make_pod(
            fetch=waiting(
                "CrashLoopBackOff",
                last=ended(2, "12% of 3 GB\nerror: org/none: 404; correct repo\n"),
            )
        ),
        words.MODEL_NOT_DOWNLOADED,
        ["org/none: 404; correct repo", "spec.model.huggingFace"],
    ),
    (
        "and tried again",
        make_pod(fetch=running(last=ended(2, "error: 401"), restarts=1)),
        words.MODEL_NOT_DOWNLOADED,
        ["401"],
    ),
    (
        "killed without a word",
        make_pod(fetch={"state": {"terminated": ended(137)}}),
        words.MODEL_NOT_DOWNLOADED,
        ["exit status 137"],
    ),
    (
        "no node is free",
        make_pod(
            conditions=scheduled(
                "False", "Unschedulable", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
            )
        ),
        words.UNSCHEDULABLE,
        ["0/3 nodes are available: 3 Insufficient nvidia.com/gpu;", "add or free nodes"],
    ),
    (
        "no word of the scheduler",
        make_pod(conditions=scheduled("False", "Unschedulable")),
        words.UNSCHEDULABLE,
        ["found no node"],
    ),
    (
        "a gate",
        make_pod(conditions=scheduled("False", "SchedulingGated", "gated")),
        words.UNSCHEDULABLE,
        ["scheduling gate"],
    ),
    (
        "the node gave it up",
        make_pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
        words.UNSCHEDULABLE,
        ["(Evicted): The node was low on resource: memory"],
    ),
]


@pytest.mark.parametrize(
    ("pod", "reason", "parts"), [case[1:] for case in PROBLEMS], ids=[case[0] for case in PROBLEMS]
)
def test_problem_names_the_pod_what_is_wrong_and_what_to_do(pod, reason, parts):
    found, message = pod_problem(pod)
    assert found == reason
    assert message.startswith("pod chat-decode-cpu-aaaa-0: ")
    for part in parts:
        assert part in message
    assert "\n" not in message


FINE = [
    ("just made", make_pod()),
    ("without any status", {key: value for key, value in make_pod().items() if key != "status"}),
    ("being started", make_pod(worker=waiting("ContainerCreating"))),
    ("waits for the download to start", make_pod(fetch=waiting("PodInitializing"))),
    (
        "downloaded",
        make_pod(fetch={"state": {"terminated": ended(0, "", "Completed")}}, worker=running()),
    ),
    ("loads the model", make_pod(worker=running())),
    (
        "a stock engine loads it",
        make_pod(engine={**running(), "ready": True}, worker=running()),
    ),
    ("one crash is chance", make_pod(worker=running(last=ended(1), restarts=1))),
    ("restarted after a clean end", make_pod(worker=running(last=ended(0), restarts=5))),
    (
        "ready now, whatever was",
        make_pod(worker={**running(last=ended(2), restarts=5), "ready": True}),
    ),
    ("placed", make_pod(conditions=scheduled("True", ""))),
    (
        "ready",
        make_pod(
            worker=running(last=ended(1), restarts=9),
            conditions=[{"type": "Ready", "status": "True"}],
        ),
    ),
]


@pytest.mark.parametrize("pod", [case[1] for case in FINE], ids=[case[0] for case in FINE])
def test_no_problem(pod):
    assert pod_problem(pod) is None


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
def test_no_other_engine_is_said_to_load(pod: Any):
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


def test_a_pod_that_is_no_worker_is_refused():
    pod = make_pod()
    pod["metadata"]["labels"] = {"pdcluster.io/cluster": "chat"}
    with pytest.raises(KeyError, match="role"):
        pod_state(pod)
