"""A module's own operator in its own namespace, so that modules do not disturb each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import Scene
from tests.apiserver.plain_api import PlainApi

SELDOM = "300"
"""Seconds between resyncs, as by default: none comes to the help of a test, which has to see what
watches and our own answers do.
"""


@contextmanager
def operator_in(
    plane: ControlPlane, folder: Path, namespace: str, **settings: str
) -> Iterator[OperatorProcess]:
    """A new namespace and an operator that serves it alone.  settings: environment variables over
    the ones that tests use.
    """
    plane.kubectl("create", "namespace", namespace)
    try:
        with OperatorProcess(
            folder, plane.kubeconfig, PDCLUSTER_WATCH_NAMESPACES=namespace, **settings
        ) as process:
            yield process
    finally:
        plane.kubectl("delete", "namespace", namespace, "--wait=false")


@contextmanager
def ready_scene(plane: ControlPlane, namespace: str) -> Iterator[Scene]:
    """A cluster that is ready, with nodes for its pods, for tests that leave it so."""
    api = PlainApi(plane.kubeconfig)
    with Nodes(api, namespace):
        found = Scene(api, namespace)
        found.create()
        found.await_condition("Ready", "True")
        yield found
