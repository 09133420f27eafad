"""Fixtures on a real cluster; nothing is mocked.

A fixture brings about a state and changes nothing when it is there, so the
tests may run in any order and the slow steps (operator installed, example ready)
happen once unless a test undoes them.  A failed test leaves objects, events and
logs under e2e/.artifacts, those of the rig in `rig` there.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from e2e.greedy import Greedy
from e2e.harness import (
    ARTIFACTS,
    EXAMPLE,
    FLEET_ENGINE,
    LOOK_SECONDS,
    NAME,
    READY_SECONDS,
    SELECTOR,
    Kubernetes,
    example,
    kubernetes,
    save_state,
    wait_for_workers,
)
from e2e.rig.paths import CACHE, HAS_STOCK_ENGINE, LONG_SWITCH, STOCK_SWITCH, TAKES_LONG
from tests.system.waiting import wait_for

TIMEOUT_SECONDS = 1800
HOPELESS_SECONDS = 30.0
_used: list[Kubernetes] = []
_late: list[str] = []
_notes: list[str] = []


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Kubernetes]:
    """The cluster under test; what is built and started for it, for minutes the first time, is
    shown at once.
    """
    shutil.rmtree(ARTIFACTS, ignore_errors=True)
    shown = request.config.pluginmanager.getplugin("capturemanager")
    with ExitStack() as stack:
        with shown.global_and_fixture_disabled():
            _used.append(stack.enter_context(kubernetes()))
        yield _used[-1]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """The first test waits for the cluster, and that may have its images to build.

    The order is random, but for the tests on the fleet, and those that need a cluster without
    workers: they come together, at the end, for each change between them and the others replaces
    all workers.
    """
    for item in items:
        item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))
        if HAS_STOCK_ENGINE and _fixtures(item) & {"chat", "fleet"}:
            item.add_marker(pytest.mark.skip(f"{STOCK_SWITCH} is set: the cluster has no worker"))
        if item.get_closest_marker("long") and not TAKES_LONG:
            item.add_marker(pytest.mark.skip(f"takes minutes: set {LONG_SWITCH}=1"))
    yield
    items.sort(key=lambda item: bool(_fixtures(item) & {"fleet", "alone"}))


@pytest.fixture
def operator(cluster: Kubernetes) -> Kubernetes:
    """The cluster with the operator installed."""
    cluster.install_operator()
    return cluster


@pytest.fixture
def chat(operator: Kubernetes) -> Kubernetes:
    """The cluster with examples/chat.yaml ready, one worker of each role, and a client pod."""
    operator.kubectl("apply", f"--filename={EXAMPLE}")
    if _scalers_exist(operator):
        operator.scale(prefill=1, decode=1)
    operator.start_client()
    wait_until_ready(operator)
    wait_for_workers(operator, prefill=1, decode=1)
    return operator


@pytest.fixture
def fleet(operator: Kubernetes) -> Iterator[Kubernetes]:
    """The example in float32, so that tokens can be compared, with two workers of each role, and a
    client pod.
    """
    spec = example()["spec"]
    spec["model"]["dtype"], spec["engine"] = "float32", FLEET_ENGINE
    operator.kubectl("apply", "--filename=-", stdin=json.dumps({**example(), "spec": spec}))
    operator.start_client()
    wait_until_ready(operator)
    operator.scale(prefill=2, decode=2)
    wait_for_workers(operator, prefill=2, decode=2)
    yield operator
    operator.scale(prefill=1, decode=1)  # a new revision beside four workers would not find room
    wait_for_workers(operator, prefill=1, decode=1)


@pytest.fixture(scope="session")
def greedy() -> Greedy:
    """The reference for answers of the fleet."""
    return Greedy(CACHE.model)


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes a line with figures of the test, to be shown at the end of the session."""
    return lambda line: _notes.append(f"{request.node.name}: {line}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what was noted."""
    for line in _notes:
        terminalreporter.write_line(line)


def wait_until_ready(operator: Kubernetes) -> None:
    """Wait for the example; where it did not get ready in good time once, the tests that follow
    soon give up.
    """
    try:
        seconds = HOPELESS_SECONDS if _late else READY_SECONDS
        wait_for(
            operator.is_ready,
            seconds,
            lambda: operator.kubectl("get", "pods,pdc"),
            poll_seconds=LOOK_SECONDS,
        )
    except AssertionError:
        _late.append(NAME)
        raise


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Save the cluster's state while it is as the failed test left it."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed and _used:
        save_state(_used[-1], ARTIFACTS / re.sub(r"\W+", "-", f"{item.name}-{report.when}"))


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


def _scalers_exist(operator: Kubernetes) -> bool:
    names = operator.kubectl("get", "pdps", f"--selector={SELECTOR}", "--output=name")
    return len(names.split()) >= 2
