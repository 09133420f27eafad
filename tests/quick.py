"""`pytest --quick`, as `make quick` runs it: tests that need one process and no torch.

Its files are those of FOLDERS that import nothing of SLOW, without the tests that are marked
`processes` or `machine`.  A line that imports torch or starts a process all the same raises.
"""

import platform
import re
import sys
import unittest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "tests/contract",
    "tests/schema",
    "tests/simulator",
    "tests/operator/pdcluster_api",
    "tests/operator/pdcluster_operator",
    "tests/operator/pdctl/bench",
    "tests/operator/pdctl/cli",
    "tests/operator/pdctl/preview",
    "tests/worker/config",
    "tests/worker/serving",
    "tests/worker/engine",
    "tests/worker/headless",
    "tests/worker/tracing",
    "tests/worker/messages",
    "tests/worker/proxy",
    "tests/worker/routing",
    "tests/worker/stock_engine",
)
SLOW = re.compile(
    r"^(import|from) (torch|pdcluster_worker\.model|subprocess|psutil"
    r"|tests\.system\.etcd_server|tests\.tls_etcd|tests\.chart\.helm_chart"
    r"|tests\.contract\.prometheus_rules)\b",
    re.MULTILINE,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of `make quick`."""
    parser.addoption("--quick", action="store_true", help="only tests without processes and torch")


def pytest_configure(config: pytest.Config) -> None:
    """Processes that xdist's controller starts are its own."""
    if config.getoption("--quick"):
        config.pluginmanager.register(Quick())
        if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
            platform.processor()  # asks uname, once
            sys.addaudithook(refuse)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark hypothesis' state machines."""
    for item in items:
        cls = getattr(item, "cls", None)
        if item.name == "runTest" and cls is not None and issubclass(cls, unittest.TestCase):
            item.add_marker(pytest.mark.machine)


class Quick:
    """Leaves out what is not quick."""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Skip files that are not quick, so that nothing imports them."""
        return None if is_quick(collection_path) else True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what is marked."""
        slow = [item for item in items if is_slow(item)]
        items[:] = [item for item in items if not is_slow(item)]
        config.hook.pytest_deselected(items=slow)


def is_quick(path: Path) -> bool:
    """Return whether a file is a quick one, or a folder may hold some."""
    folders = [ROOT / folder for folder in FOLDERS]
    if path.is_dir():
        return any(path.is_relative_to(each) or each.is_relative_to(path) for each in folders)
    return any(path.is_relative_to(each) for each in folders) and not SLOW.search(path.read_text())


def is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("processes", "machine"))


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """Python's audit hook: no torch and no process."""
    if event == "import" and arguments[0] == "torch":
        raise RuntimeError("make quick: imports torch; see SLOW in tests/quick.py")
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn") and not lists_fonts(arguments):
        raise RuntimeError("make quick: starts a process; mark the test with `processes`")


def lists_fonts(arguments: tuple[object, ...]) -> bool:
    """Matplotlib does once on a machine, for a file that it keeps."""
    return bool(arguments) and arguments[0] == "fc-list"
