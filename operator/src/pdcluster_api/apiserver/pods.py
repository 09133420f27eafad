"""Problems of a pod, in words that a user can act on. Pure. Counters and back-off times are left
out, so that a pod that goes on failing says the same all the time.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdcluster_api.apiserver.container_ends import (
    BACK_OFF,
    first_error,
    keeps_crashing,
    latest_end,
    termination_message,
)
from pdcluster_api.manifests.worker_pod import FORGET_SECONDS, seconds_of_sigterm
from pdcluster_api.plan.observed.state import EndingPod, PodState, Problem
from pdcluster_schema import conditions, labels
from pdcluster_schema.ports import MAX_WORKER_RANKS
from pdcluster_schema.text import shortened
from pdcluster_schema.workload import WorkloadId

Body = Mapping[str, Any]

WORKER = "worker"
ENGINE = "engine"
COMPUTING = (WORKER, ENGINE)
WRONG_SETTING = 2  # exit status of a worker, its download or its engine with wrong settings
NO_DEVICE = 3  # exit status of a worker that has not the device that it was asked for
NO_NIXL = "NIXL is not available"  # how vLLM ends with NixlConnector, in an image without it
MAX_DETAIL = 400  # characters of a foreign message; more hides the point

_IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)
_REFUSED_REASONS = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"}
)
_FETCH = re.compile("fetch-(?:model|adapter-([0-9]+))")  # others are of a user's template
_PULL_PREFIX = re.compile(r'^Back-off pulling image "[^"]*"(: ErrImagePull: )?')


@dataclass(frozen=True)
class Hints:
    name: str  # the field that names their image
    pull: str  # what to check when the image is not pulled
    scheduling: str  # what to change when no node takes one
    memory: str  # when one was killed for its memory


FOR_WORKERS = Hints(
    name="spec.image.name",
    pull="spec.image: name, pullSecrets, pullPolicy",
    scheduling="change the pool's gpu, resources or placement",
    memory="raise resources.limits.memory, or lower engine.kvCacheMemory",
)
FOR_ENGINES = replace(
    FOR_WORKERS,
    name="spec.engine.image",
    pull="spec.engine.image, and of spec.image pullSecrets and pullPolicy",
)
FOR_ETCD = Hints(
    name="spec.discovery.etcd.image",
    pull="spec.discovery.etcd.image, or without it the operator's setting (etcdImage of the chart)",
    scheduling="see to the volume that discovery.etcd.storage asks for",
    memory="its limit is far above what a cluster's records take: `kubectl logs -p` shows what it "
    "did",
)


def pod_state(body: Body) -> PodState:
    """The state of one worker pod.  Raises KeyError for a pod without the labels of a worker."""
    metadata, marks = body["metadata"], body["metadata"]["labels"]
    workload = WorkloadId(
        cluster=marks[labels.CLUSTER],
        role=marks[labels.ROLE],
        pool=marks[labels.POOL],
        revision=marks[labels.REVISION],
        template=marks.get(labels.TEMPLATE, ""),
    )
    annotations = metadata.get("annotations") or {}
    return PodState(
        name=metadata["name"],
        workload=workload,
        ready=condition_of(body, "Ready").get("status") == "True",
        terminating=bool(metadata.get("deletionTimestamp")),
        problem=pod_problem(body),
        node=(body.get("spec") or {}).get("nodeName") or "",
        gpu=str(annotations.get(labels.GPU, "")),
        gpus_per_replica=_number(annotations.get(labels.GPUS_PER_REPLICA)),
        started=_has_started(body),
        since=_since(body),
        loading=_loading(body),
        grace_seconds=_short_grace(body),
    )


def _short_grace(body: Body) -> int | None:
    """`PodState.grace_seconds`, of a pod that was deleted or evicted with less than its own."""
    given = body["metadata"].get("deletionGracePeriodSeconds")
    own = (body.get("spec") or {}).get("terminationGracePeriodSeconds")
    if given is None or own is None or given >= own:
        return None
    return seconds_of_sigterm(given, FORGET_SECONDS)


def ending_pod(body: Body) -> EndingPod:
    node = (body.get("spec") or {}).get("nodeName") or ""
    return EndingPod(body["metadata"]["name"], node, _since(body))


def _number(text: object) -> int:
    return next((each for each in range(1, MAX_WORKER_RANKS + 1) if str(each) == text), 0)


def _has_started(body: Body) -> bool:
    return any(
        each["name"] == WORKER and each.get("started") and "running" in (each.get("state") or {})
        for each in _statuses(body)
    )


def _loading(body: Body) -> str:
    """`PodState.loading`: a time that it began at, not how long ago that is, which always differs.
    Kubernetes shows no line of a container that runs; the operator may not read logs.
    """
    entries = (body.get("status") or {}).get("initContainerStatuses") or ()
    engine: Body = next((each for each in entries if each["name"] == ENGINE), {})
    running = (engine.get("state") or {}).get("running")
    if running is None or _has_started(body) or condition_of(body, "Ready").get("status") == "True":
        return ""
    name, since = body["metadata"]["name"], running.get("startedAt") or "its start"
    return (
        f"pod {name}: its engine runs since {since} and does not serve yet; `kubectl logs {name} "
        f"-c {ENGINE}` shows what it waits for"
    )


def _since(body: Body) -> str | None:
    """`PodState.since`; without a Ready condition from its creation."""
    metadata, ready = body["metadata"], condition_of(body, "Ready")
    if metadata.get("deletionTimestamp"):
        return str(metadata["deletionTimestamp"])
    if ready.get("status") == "True":
        return None
    since: str | None = ready.get("lastTransitionTime") or metadata.get("creationTimestamp")
    return since


def pod_problem(body: Body, hints: Hints = FOR_WORKERS) -> Problem | None:
    """Problem of a pod that is not ready; None = it is ready, terminating, or just starting."""
    is_ready = condition_of(body, "Ready").get("status") == "True"
    if body["metadata"].get("deletionTimestamp") or is_ready:
        return None
    found = _not_placed(body, hints) or _given_up(body) or _first_problem(body, hints)
    return found and Problem(found.reason, f"pod {body['metadata']['name']}: {found.message}")


def _not_placed(body: Body, hints: Hints) -> Problem | None:
    placed = condition_of(body, "PodScheduled")
    if placed.get("status") != "False":
        return None
    cause = short(placed.get("message", "")) or "the scheduler found no node"
    since = f" since {placed['lastTransitionTime']}" if placed.get("lastTransitionTime") else ""
    message = f"no node takes it{since}: {cause}; add or free nodes, or {hints.scheduling}"
    if placed.get("reason") == "SchedulingGated":
        holder = "its owner (a queue, an admission webhook) must lift it"
        message = f"a scheduling gate holds it back; {holder}"
    return Problem(conditions.UNSCHEDULABLE, message)


def _given_up(body: Body) -> Problem | None:
    """A pod that the node gave up (evicted, out of a resource); its StatefulSet makes another."""
    status = body.get("status") or {}
    reason, cause = status.get("reason"), short(status.get("message", ""))
    if status.get("phase") != "Failed" or not reason:
        return None
    message = f"its node gave it up ({reason}): {cause}; look at that node"
    return Problem(conditions.UNSCHEDULABLE, message)


def _first_problem(body: Body, hints: Hints) -> Problem | None:
    status, spec = body.get("status") or {}, body.get("spec") or {}
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    images = {entry["name"]: entry.get("image", "") for entry in containers}
    since = condition_of(body, "Ready").get("lastTransitionTime")
    found = [
        problem
        for entry in (*(status.get("initContainerStatuses") or ()), *_statuses(body))
        if (
            problem := _container_problem(
                entry, images.get(entry["name"]) or entry.get("image", ""), hints, since
            )
        )
    ]
    # what the worker refuses says more than how the engine beside it fails by that
    refused = (each for each in found if each.reason == conditions.CONFIGURATION_REFUSED)
    return next(refused, found[0] if found else None)


def _statuses(body: Body) -> Iterable[Body]:
    return (body.get("status") or {}).get("containerStatuses") or ()


def _container_problem(entry: Body, image: str, hints: Hints, since: str | None) -> Problem | None:
    """Problem of one container.  since: when the pod became unready; None = that is not known."""
    name, state = entry["name"], entry.get("state") or {}
    is_engine = name == ENGINE
    hints = FOR_ENGINES if is_engine else hints
    waiting, running = state.get("waiting") or {}, "running" in state
    reason, detail = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _IMAGE_REASONS:
        return Problem(conditions.IMAGE_NOT_PULLED, _image_message(reason, detail, image, hints))
    if reason in _REFUSED_REASONS:
        cause = f"container {name} cannot be started: {short(detail) or reason}"
        message = f"{cause}; make what is missing, or correct its name"
        return Problem(conditions.CONFIGURATION_REFUSED, message)
    ended = latest_end(entry, since)
    if fetch := _FETCH.fullmatch(name):
        return _fetch_problem(fetch, ended, is_running=running)
    code = ended.get("exitCode")
    if (
        # an engine that runs counts as ready, and may be loading to fail again
        (entry.get("ready") and not is_engine)
        or not ended
        # vLLM ends with status 0 when the process that computes has died
        or (code == 0 and not is_engine and reason != BACK_OFF)
    ):
        return None
    is_refusal = code == WRONG_SETTING or (code == NO_DEVICE and name == WORKER)
    return _crash(name, ended, hints) if is_refusal or keeps_crashing(entry, since) else None


def _image_message(reason: str, message: str, image: str, hints: Hints) -> str:
    name = f"image {image!r}" if image else "its image"
    if reason == "InvalidImageName":
        return f"{name} is not the name of an image; correct {hints.name}"
    detail = short(_PULL_PREFIX.sub("", message))
    cause = f" ({detail})" if detail else ""
    check = f"check {hints.pull}, and that the node reaches the registry"
    return f"{name} cannot be pulled{cause}; {check}"


def _fetch_problem(fetch: re.Match[str], ended: Body, *, is_running: bool) -> Problem | None:
    name, place = fetch[0], fetch[1]
    what, field = "the model", "spec.model.huggingFace"
    if place is not None:
        what, field = "an adapter", f"spec.model.adapters[{place}].huggingFace"
    code = ended.get("exitCode")
    has_failed = bool(ended) and code != 0
    if is_running and not (has_failed and code == WRONG_SETTING):
        shown = f"`kubectl logs -c {name}` shows how far it is"
        message = f"{what} is being downloaded; {shown}"
        return Problem(conditions.DOWNLOADING_MODEL, message)
    if not has_failed:
        return None
    cause = short(termination_message(ended.get("message", ""))) or f"exit status {code}"
    check = f"check {field} and the node's way to the hub"
    message = f"{what} is not downloaded: {cause}; {check}"
    return Problem(conditions.MODEL_NOT_DOWNLOADED, message)


def end_of(container: str, ended: Body) -> str:
    """The end of a container, in words."""
    if ended.get("reason") == "OOMKilled":
        return f"container {container} used more memory than its limit and was killed"
    cause = _last_words(container, ended)
    ends = f"container {container} ends with exit status {ended.get('exitCode')}"
    return f"{ends}: {cause}" if cause else ends


def _last_words(container: str, ended: Body) -> str:
    left = ended.get("message", "")
    return short(first_error(left) if container == ENGINE else termination_message(left))


def _crash(container: str, ended: Body, hints: Hints) -> Problem:
    text, code = end_of(container, ended), ended.get("exitCode")
    if ended.get("reason") == "OOMKilled":
        return Problem(conditions.CRASH_LOOPING, f"{text}; {hints.memory}")
    shown = _last_words(container, ended) or "see its log"
    if code == WRONG_SETTING and container == ENGINE:
        fix = "correct engine.args, or the field that the flag stands for"
        message = f"the engine refuses its command line: {shown}; {fix}"
        return Problem(conditions.CONFIGURATION_REFUSED, message)
    if code == WRONG_SETTING and container == WORKER:
        message = f"the worker refuses its settings: {shown}; correct the spec"
        return Problem(conditions.CONFIGURATION_REFUSED, message)
    if code == NO_DEVICE and container == WORKER:
        message = f"the worker has not the device that it should compute on: {shown}"
        return Problem(conditions.ACCELERATOR_UNUSABLE, message)
    if container == ENGINE and NO_NIXL in shown:
        fix = "the image lacks nixl, which prefill and decode workers need: give spec.engine.image"
        return Problem(conditions.CRASH_LOOPING, f"{text}; {fix} one that has it")
    message = f"{text}; `kubectl logs -p -c {container}` shows more"
    return Problem(conditions.CRASH_LOOPING, message)


def short(message: str) -> str:
    return shortened(" ".join(message.split()).rstrip(".;"), MAX_DETAIL)


def condition_of(body: Body, kind: str) -> Body:
    found = (body.get("status") or {}).get("conditions") or ()
    return next((entry for entry in found if entry.get("type") == kind), {})
