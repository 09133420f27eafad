"""Fixtures on a real cluster; nothing is mocked.

A fixture brings about a state and changes nothing when it is there, so the
tests run in any order and the slow steps (operator installed, example ready)
happen once unless a test undoes them.  A failed test leaves objects, events and
logs under e2e/.artifacts, those of the rig in `rig` there.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from e2e.harness import ARTIFACTS, EXAMPLE, NAME, Kubernetes, kubernetes, save_state
from e2e.rig.shell import CommandError
from tests.system.waiting import wait_for

READY_SECONDS = 300.0
TIMEOUT_SECONDS = 1800
HOPELESS_SECONDS = 30.0
_used: list[Kubernetes] = []
_late: list[str] = []


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Kubernetes]:
    """The cluster under test; what is built and started for it, for minutes the first time, is shown at once."""
    shutil.rmtree(ARTIFACTS, ignore_errors=True)
    shown = request.config.pluginmanager.getplugin("capturemanager")
    with ExitStack() as stack:
        with shown.global_and_fixture_disabled():
            _used.append(stack.enter_context(kubernetes()))
        yield _used[-1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test waits for the cluster, and that may have its images to build."""
    for item in items:
        item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


@pytest.fixture
def operator(cluster: Kubernetes) -> Kubernetes:
    """The cluster with the operator installed."""
    cluster.install_operator()
    return cluster


@pytest.fixture
def chat(operator: Kubernetes) -> Kubernetes:
    """The cluster with examples/cpu-cluster.yaml ready, one worker of each role, and a client pod."""
    operator.kubectl("apply", f"--filename={EXAMPLE}")
    operator.kubectl("scale", f"pdps/{NAME}-decode-cpu", "--replicas=1") if _scaler_exists(operator) else None
    operator.start_client()
    wait_until_ready(operator)
    wait_for(lambda: len(operator.pods("pdcluster.io/role=decode")) == 1, READY_SECONDS, "one decode worker")
    return operator


def wait_until_ready(operator: Kubernetes) -> None:
    """Wait for the example; where it did not get ready in good time once, the tests that follow soon give up."""
    timeout = HOPELESS_SECONDS if _late else READY_SECONDS
    try:
        operator.kubectl("wait", "--for=condition=Ready", f"pdc/{NAME}", f"--timeout={timeout:.0f}s")
    except CommandError:
        _late.append(NAME)
        raise


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Save the cluster's state while it is as the failed test left it."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed and _used:
        save_state(_used[-1], ARTIFACTS / re.sub(r"\W+", "-", f"{item.name}-{report.when}"))


def _scaler_exists(operator: Kubernetes) -> bool:
    return bool(operator.kubectl("get", "pdps", f"{NAME}-decode-cpu", "--ignore-not-found", "--output=name").strip())
