"""A gate that looks at latencies, from real HTTP scrapes to StatefulSets: a slow revision goes
back, one that is no slower passes.
"""

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pdcluster_schema import labels
from pdcluster_schema.ports import HTTP_PORT
from tests.apiserver import nodeless
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_fixtures import SELDOM
from tests.apiserver.operator_stage import Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.worker_pages import WorkerPages

_numbers = itertools.count(1)
NAMESPACE = "operator-latency"
SETTINGS = {"PDCLUSTER_RESYNC_SECONDS": SELDOM}
NET = f"127.{100 + os.getpid() % 100}"  # the operator asks at the port of pods
MOST_REVISIONS, MOST_WORKERS = 4, 3
REQUESTS = 60  # of each worker between two scrapes
FAST, LATE = 0.06, 2.0
OTHER_ENGINE = {"maxBatchedTokens": 512}
ROLLOUT = {
    "strategy": "Rolling",
    "drainTimeoutSeconds": 1,  # no worker here says that it has drained
    "onFailure": "Rollback",
    "bakeSeconds": 2,
    "minRequests": 50,
}
AUTOSCALE = {"mode": "Advise", "objective": {"ttft": {"percentile": 90, "seconds": 0.5}}}
ROLES = {"mixed": {"pools": [{"name": "cpu", "replicas": 2, "maxReplicas": 4}]}}


class Workers:
    """Addresses on loopback that serve /metrics; each revision has some of them, and one page."""

    def __init__(self) -> None:
        self.ttft: dict[str, float] = {}
        self._nets: dict[str, int] = {}
        self._pages = [WorkerPages() for _ in range(MOST_REVISIONS)]
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def start(self) -> None:
        for net, host in itertools.product(range(MOST_REVISIONS), range(1, MOST_WORKERS + 1)):
            server = ThreadingHTTPServer((f"{NET}.{net}.{host}", HTTP_PORT), self._handler(net))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._stack.callback(server.server_close)
            self._stack.callback(server.shutdown)

    def close(self) -> None:
        self._stack.close()

    def rule(self, pod: Body) -> Body | None:
        """For `Nodes`."""
        marks = pod["metadata"]["labels"]
        if labels.ROLE not in marks:
            return nodeless.ready(pod)
        net = self._nets.setdefault(marks[labels.REVISION], len(self._nets))
        address = f"{NET}.{net}.{int(pod['metadata']['name'].rpartition('-')[2]) + 1}"
        return {**nodeless.ready(pod), "podIP": address, "podIPs": [{"ip": address}]}

    def page(self, net: int) -> bytes:
        """The page of a revision, after some more requests."""
        revision = next((name for name, number in self._nets.items() if number == net), "")
        with self._lock:
            late = self.ttft.get(revision, FAST)
            self._pages[net].serve(requests=REQUESTS, ttft_seconds=late)
            return self._pages[net].text()

    def _handler(self, net: int) -> type[BaseHTTPRequestHandler]:
        workers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = workers.page(net)
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                return

        return Handler


@pytest.fixture
def workers(nodes: Nodes) -> Iterator[Workers]:
    found = Workers()
    found.start()
    nodes.rule = found.rule
    yield found
    found.close()


@pytest.fixture
def scene(control_plane: ControlPlane, workers: Workers) -> Iterator[Scene]:
    """A cluster that is ready under its first revision."""
    found = Scene(PlainApi(control_plane.kubeconfig), NAMESPACE, f"chat-{next(_numbers)}")
    found.create(roles=ROLES, autoscale=AUTOSCALE, rollout=ROLLOUT)
    found.await_condition("Ready", "True")
    yield found
    found.delete()


def size(scene: Scene, revision: str) -> int | None:
    found = scene.children("StatefulSet").get(scene.workload("mixed", revision=revision))
    return None if found is None else int(found["spec"]["replicas"])


def test_a_slow_revision_is_rolled_back_with_the_figures_of_both(
    scene: Scene, workers: Workers
) -> None:
    old = scene.revision
    scene.change(engine=OTHER_ENGINE)
    new, spec = scene.revision, scene.body["spec"]
    workers.ttft[new] = LATE

    found = scene.await_condition("RolledBack", "True", "GateFailed")["message"]

    why = "time_to_first_token_seconds_p90 is "
    assert f"revision {new} was rolled back to {old}: {why}" in found
    assert f"s of revision {new} over " in found
    assert "of the old one in the same time; autoscale.objective is 0.5 s" in found
    scene.until(lambda: (size(scene, old), size(scene, new)) == (2, None))
    assert scene.body["spec"] == spec
    assert scene.condition("Serving")["status"] == "True"


def test_a_revision_that_is_no_slower_passes_each_gate(scene: Scene, workers: Workers) -> None:
    old = scene.revision
    scene.change(engine=OTHER_ENGINE)
    new = scene.revision

    scene.await_condition("Ready", "True")

    scene.until(lambda: (size(scene, old), size(scene, new)) == (None, 2))
    assert scene.condition("RolledBack") == {}
