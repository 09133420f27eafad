"""One control plane for all tests of this folder, and a namespace for each.

Nothing is mocked: etcd, kube-apiserver and kube-controller-manager are the real
programs (`make kubernetes`).  There is no node, so pods stay Pending until a
test writes their status.
"""

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.apiserver.cluster_client import Body, Connection, connected
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.objects import Objects
from tests.apiserver.operator_fixtures import operator_in
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.plain_api import PlainApi

FOLDER = Path(__file__).parent
CRDS = Path(__file__).parents[2] / "crds"
_numbers = itertools.count(1)


class EndsWithFolder:
    """Ends the control plane before the first test of another folder, since one that idles takes a
    good part of a core.

    Only with `-n`, which deals the tests out folder by folder (tests/conftest.py).
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if FOLDER not in item.path.parents:
            self._plane.close()


@pytest.fixture(scope="session")
def control_plane(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[ControlPlane]:
    """With controllers and our CRDs; a test leaves it as it found it, its own namespace aside."""
    with ControlPlane(
        tmp_path_factory.mktemp("control-plane"), with_controllers=True, crds=CRDS
    ) as plane:
        if "PYTEST_XDIST_WORKER" in os.environ:
            pytestconfig.pluginmanager.register(EndsWithFolder(plane))
        yield plane


@pytest.fixture(scope="session")
def administrator(control_plane: ControlPlane) -> PlainApi:
    """All rights, without kubectl's start-up time."""
    return PlainApi(control_plane.kubeconfig)


@pytest.fixture
def namespace(administrator: PlainApi) -> Iterator[str]:
    """A fresh namespace, which goes with the test."""
    name = f"test-{next(_numbers)}"
    administrator.create("/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    administrator.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def clusters(control_plane: ControlPlane, namespace: str) -> Iterator[Objects]:
    """The PDClusters of this test's namespace."""
    objects = Objects(control_plane, namespace)
    yield objects
    objects.close()


@pytest.fixture
def scalers(control_plane: ControlPlane, namespace: str) -> Iterator[Objects]:
    """The PDPoolScalers of this test's namespace."""
    objects = Objects(control_plane, namespace, "pdpoolscalers")
    yield objects
    objects.close()


@pytest.fixture(scope="session")
def dry_clusters(control_plane: ControlPlane) -> Iterator[Objects]:
    """PDClusters of the namespace `default`, for dry runs, which leave nothing there."""
    objects = Objects(control_plane, "default")
    yield objects
    objects.close()


@pytest.fixture(scope="module")
def operator(
    control_plane: ControlPlane,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[OperatorProcess]:
    """The module's own, in its NAMESPACE; with SETTINGS, environment variables, where
    it has some.
    """
    folder, settings = tmp_path_factory.mktemp("operator"), getattr(request.module, "SETTINGS", {})
    with operator_in(control_plane, folder, request.module.NAMESPACE, **settings) as process:
        yield process


@pytest.fixture
def nodes(
    control_plane: ControlPlane, operator: OperatorProcess, request: pytest.FixtureRequest
) -> Iterator[Nodes]:
    """Nodes for the pods of the module's namespace."""
    with Nodes(PlainApi(control_plane.kubeconfig), request.module.NAMESPACE) as found:
        yield found


@pytest.fixture
def own_plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """An API server that a test may stop."""
    with ControlPlane(tmp_path) as plane:
        yield plane


@pytest_asyncio.fixture
async def connection(control_plane: ControlPlane) -> AsyncIterator[Connection]:
    """The operator's client."""
    async with connected(control_plane.kubeconfig) as made:
        yield made


@pytest_asyncio.fixture
async def owner(connection: Connection, namespace: str) -> Body:
    """A PDCluster that owns what a test makes."""
    return await connection.owner(namespace)
