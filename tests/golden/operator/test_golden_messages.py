"""Messages that operator and pdctl make of what others write: pods, traces, the API server."""

import json
from pathlib import Path
from typing import Any

import yaml

from pdcluster_api.apiserver.errors import error_of, failure_of
from pdcluster_api.apiserver.pods import pod_problem
from pdcluster_api.errors import InvalidTraceError
from pdcluster_api.traces.loads import read_loads
from tests.golden.operator.golden_yaml import RECORDS
from tests.golden.records import check, check_names

HERE, FOLDER = Path(__file__).parent, RECORDS / "messages"
PODS, TRACES, ERRORS = (
    yaml.safe_load((HERE / f"{name}.yaml").read_text()) for name in ("pods", "traces", "api_errors")
)
FIRST = ("fetch-model", "fetch-adapter-1", "engine")
IMAGES = dict.fromkeys(FIRST, "example.com/worker:1") | {"engine": "vllm/vllm-openai:v0.32.0"}


def pod(given: dict[str, Any]) -> dict[str, Any]:
    """given: container statuses by name, and other fields of a pod's status."""
    fields = {"phase", "reason", "message", "conditions"} & given.keys()
    statuses = [
        {"name": name, "restartCount": 0, **each}
        for name, each in given.items()
        if name not in fields
    ]
    return {
        "metadata": {"name": "chat-decode-cpu-aaaa-0"},
        "spec": {
            "initContainers": [{"name": name, "image": IMAGES[name]} for name in FIRST],
            "containers": [{"name": "worker", "image": IMAGES["fetch-model"]}],
        },
        "status": {
            "phase": "Pending",
            "initContainerStatuses": [each for each in statuses if each["name"] in FIRST],
            "containerStatuses": [each for each in statuses if each["name"] not in FIRST],
            **{name: given[name] for name in fields},
        },
    }


def test_problems_of_pods() -> None:
    lines = []
    for name, given in PODS.items():
        problem = pod_problem(pod(given))
        lines += [name, "  " + (": ".join(problem) if problem else "-")]
    check(FOLDER / "pods.txt", "\n".join(lines) + "\n")


def test_faults_of_traces(tmp_path: Path) -> None:
    path, lines = tmp_path / "trace.csv", []
    for text in TRACES:
        path.write_bytes(text.encode("latin-1"))
        try:
            read_loads(path)
        except InvalidTraceError as e:
            lines += [json.dumps(text), *(f"  {fault}" for fault in e.faults)]
    check(FOLDER / "traces.txt", "\n".join(lines) + "\n")


def test_failures_of_the_api_server() -> None:
    lines = []
    for code, message in ERRORS:
        error = error_of(code, json.dumps({"kind": "Status", "message": message}).encode(), {})
        failure = failure_of(error, "Service chat")
        lines += [f"{code} {message}", f"  {type(error).__name__} {failure.reason}"]
        lines += [f"  {failure.message}"]
    check(FOLDER / "api_errors.txt", "\n".join(lines) + "\n")


def test_every_record_of_messages_has_its_test() -> None:
    check_names(FOLDER, ["pods.txt", "traces.txt", "api_errors.txt"])
