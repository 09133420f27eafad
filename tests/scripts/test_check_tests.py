"""The checker of tests' imports on small trees: helpers pass, a test file or the other distribution
is named.
"""

from pathlib import Path

import pytest

from tests.scripts.checker import run_script

ROOT = Path(__file__).parents[2]


def write(tree: Path, name: str, *imports: str) -> Path:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(imports) + "\n")
    return path


@pytest.mark.parametrize(
    ("name", "imports"),
    [
        ("operator/test_a.py", ["import pdctl", "from tests.operator.pods import pod"]),
        ("worker/test_a.py", ["from pdcluster_worker import config", "import pytest_asyncio"]),
        ("contract/test_a.py", ["import pdcluster_api", "import pdcluster_worker"]),
        ("certificates.py", ["import pdcluster_operator", "import pdcluster_worker"]),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, name: str, imports: list[str]) -> None:
    write(tmp_path, name, *imports)

    result = run_script("check_tests.py", tmp_path)

    assert result.stdout == "check_tests: 1 files, 0 problems\n"
    assert result.returncode == 0


@pytest.mark.parametrize(
    ("name", "line", "problem"),
    [
        (
            "worker/test_a.py",
            "from tests.worker.test_b import X, Y",
            "imports tests.worker.test_b, a test file",
        ),
        (
            "worker/test_a.py",
            "from tests.worker import test_b",
            "imports tests.worker.test_b, a test file",
        ),
        ("helper.py", "import tests.worker.test_b", "imports tests.worker.test_b, a test file"),
        (
            "operator/test_a.py",
            "import pdcluster_worker.config",
            "tests/operator imports pdcluster_worker",
        ),
        (
            "operator/pages.py",
            "    import pdcluster_worker",
            "tests/operator imports pdcluster_worker",
        ),
        ("worker/test_a.py", "import pdctl.main", "tests/worker imports pdctl"),
        ("schema/test_a.py", "import pdcluster_api", "tests/schema imports pdcluster_api"),
        (
            "system/test_a.py",
            "import pdcluster_worker",
            "a test of the operator imports pdcluster_worker",
        ),
    ],
)
def test_each_breach_is_named(tmp_path: Path, name: str, line: str, problem: str) -> None:
    first = (
        "if True:"
        if line.startswith(" ")
        else "import pdcluster_api"
        if "system" in name
        else "import os"
    )
    path = write(tmp_path, name, first, line)

    result = run_script("check_tests.py", tmp_path)

    assert result.stdout.splitlines()[0].startswith(f"{path}:2: {problem}")
    assert result.stdout.splitlines()[-1] == "check_tests: 1 files, 1 problems"
    assert result.returncode == 1
