"""Controllers of others that write into our objects: what is theirs is left to them, and a fight
over the rest ends.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdcluster_operator.reconcile.write_conflicts import MAX_WRITES
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import Scene
from tests.apiserver.plain_api import PlainApi

NAMESPACE = "operator-contested"
RIVAL = "some-controller"


@pytest.fixture
def scene(
    control_plane: ControlPlane, operator: OperatorProcess, request: pytest.FixtureRequest
) -> Iterator[Scene]:
    """A cluster that is ready."""
    api = PlainApi(control_plane.kubeconfig)
    with Nodes(api, NAMESPACE):
        found = Scene(api, NAMESPACE, f"chat-{'left' if 'left' in request.node.name else 'fought'}")
        found.create()
        found.await_condition("Ready", "True")
        yield found
        found.delete()


@contextmanager
def rival(scene: Scene, **spec: Any) -> Iterator[None]:
    """Another controller, which insists on fields of the Service."""
    path = scene.path("Service", scene.name)

    def insist() -> None:
        service = scene.api.get(path)
        if service is not None and any(
            service["spec"].get(name) != value for name, value in spec.items()
        ):
            scene.api.merge(f"{path}?fieldManager={RIVAL}", {"spec": spec})

    with again_and_again(insist):
        yield


@contextmanager
def again_and_again(work: Callable[[], None]) -> Iterator[None]:
    """Work in the background, as often as it goes."""
    end = threading.Event()

    def insist() -> None:
        while not end.wait(0.005):
            work()

    thread = threading.Thread(target=insist, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_a_fight_over_our_fields_ends_in_a_failure_that_names_the_other(
    scene: Scene, operator: OperatorProcess
):
    with rival(scene, selector={"pdcluster.io/revision": "00000000"}):
        message = scene.await_condition("Ready", "False", "ApplyFailed")["message"]
        assert f"{RIVAL} writes what the operator has to revert" in message
        assert f"leave Service {scene.name} alone" in message
        writes = operator.metric(
            "pdcluster_operator_api_calls_total", kind="Service", code="200", verb="apply"
        )
        operator.await_resyncs(3)
        assert (
            operator.metric(
                "pdcluster_operator_api_calls_total", kind="Service", code="200", verb="apply"
            )
            == writes
        )
    assert writes <= 10 * MAX_WRITES
