"""Stands in for nodes: pods become ready, or show what is wrong with them, by their
status alone.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from types import TracebackType
from typing import Any, Self

from tests.apiserver.plain_api import Body, PlainApi

TICK_SECONDS = 0.05
Rule = Callable[[Body], dict[str, Any] | None]
"""Map of a pod to the status that it should have; None = leave it alone."""


def ready(pod: Body) -> dict[str, Any]:
    """The status of a pod whose containers run and are ready."""
    names = [container["name"] for container in pod["spec"]["containers"]]
    running = [
        {
            "name": name,
            "ready": True,
            "started": True,
            "restartCount": 0,
            "image": "",
            "imageID": "",
            "state": {"running": {}},
        }
        for name in names
    ]
    return {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": running,
    }


def leaving(pod: Body) -> dict[str, Any]:
    """The status of a pod whose containers run and say that they are not ready any more, as a
    worker that drains.
    """
    status = ready(pod)
    containers = [{**each, "ready": False} for each in status["containerStatuses"]]
    return {
        **status,
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": containers,
    }


def bind(api: PlainApi, path: str, node: str) -> None:
    """Put a pod, by its path, on a node that has no kubelet: it goes only when it is forced to."""
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    metadata = {"name": path.rpartition("/")[2]}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
    api.create(f"{path}/binding", body)


def waiting(reason: str, message: str, container: str = "worker") -> Rule:
    """Pods of which a container waits."""

    def rule(pod: Body) -> dict[str, Any]:
        state = {"waiting": {"reason": reason, "message": message}}
        status = {
            "name": container,
            "ready": False,
            "restartCount": 0,
            "image": "",
            "imageID": "",
            "state": state,
        }
        return {
            "phase": "Pending",
            "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [status],
        }

    return rule


class Nodes:
    """Keeps the status of all pods of a namespace as the rule has it, while it is entered.  rule:
    may be changed at any time.
    """

    def __init__(self, api: PlainApi, namespace: str, rule: Rule = ready) -> None:
        self.rule = rule
        self._api, self._path = api, f"/api/v1/namespaces/{namespace}/pods"
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            # a pod changed, or the server is away: list them again
            with contextlib.suppress(AssertionError, OSError, HTTPException):
                self._tick()
            time.sleep(TICK_SECONDS)

    def _tick(self) -> None:
        for pod in self._api.items(self._path):
            status = None if "deletionTimestamp" in pod["metadata"] else self.rule(pod)
            if status is not None and status["conditions"] != [
                _short(each) for each in pod["status"].get("conditions", ())
            ]:
                self._api.merge(
                    f"{self._path}/{pod['metadata']['name']}/status", {"status": status}
                )


def _short(condition: Body) -> Body:
    return {"type": condition["type"], "status": condition["status"]}
