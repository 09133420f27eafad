"""`make check`'s script and `.ci/run` in a copied tree, with stand-ins for the tools that they
call.

What is under test is the order, the closing line and the exit status; the
tools themselves are not.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOSING = "====== 3 passed in 0.12s ======"
APISERVER = "====== 2 passed in 0.34s ======"


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def run_ci(
    tree: Path,
    *,
    test: str,
    apiserver: str = f"echo '{APISERVER}'",
    check: str = "echo checked",
) -> tuple[int, list[str]]:
    """Run .ci/run with a `make` whose targets run the given lines; returns exit status and output
    lines.
    """
    (tree / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tree / ".ci" / "run")
    targets = {"test": test, "test-apiserver": apiserver, "check": check}
    cases = "\n".join(f"{name}) {line} ;;" for name, line in targets.items())
    write_script(tree / "bin" / "make", f"case $1 in\n{cases}\nesac")
    environment = {"PATH": f"{tree / 'bin'}:{os.environ['PATH']}", "CI": "true"}
    result = subprocess.run(
        [tree / ".ci" / "run"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return result.returncode, result.stdout.splitlines()


def make_checks(tree: Path, failing: str = "no tool") -> None:
    """Copy check.sh, with tools that print their name and fail when it is `failing`."""
    (tree / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "check.sh", tree / "scripts" / "check.sh")
    (tree / "Makefile").write_text("lint-chart:\n\t@true\n")
    for tool in ("ruff", "mypy", "lint-imports", "python"):
        write_script(
            tree / ".venv" / "bin" / tool, f'echo "{tool} $*"\n[[ ! "{tool} $*" == "{failing}"* ]]'
        )


def run_check(tree: Path, *arguments: str) -> tuple[int, list[str]]:
    command = [tree / "scripts" / "check.sh", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return result.returncode, result.stdout.splitlines()


@pytest.mark.parametrize(
    "closing",
    [
        "3 passed in 0.12s",
        "===== 2 failed, 31 passed, 1 skipped, 4 warnings, 1 rerun in 83.21s (0:01:23) =====",
    ],
)
def test_ci_ends_with_closing_lines_of_pytest(tmp_path: Path, closing: str) -> None:
    status, lines = run_ci(tmp_path, test=f"echo '{closing}'")

    assert status == 0
    assert lines == [closing, APISERVER, "checked", APISERVER, closing]


@pytest.mark.parametrize(
    ("failing", "last"),
    [
        ({"test": "echo '1 failed, 2 passed in 0.12s'; exit 1"}, "1 failed, 2 passed in 0.12s"),
        ({"apiserver": f"echo '{APISERVER}'; exit 1"}, CLOSING),
        ({"check": "echo checked; exit 2"}, CLOSING),
    ],
)
def test_ci_fails_with_any_part_and_runs_the_others(
    tmp_path: Path, failing: dict[str, str], last: str
) -> None:
    status, lines = run_ci(tmp_path, **{"test": f"echo '{CLOSING}'", **failing})

    assert status == 1
    assert lines[-3:] == ["checked", APISERVER, last]


def test_ci_runs_a_failed_test_once_more_and_lists_it(tmp_path: Path) -> None:
    _, lines = run_ci(tmp_path, test=f'echo "$PYTEST_ADDOPTS"; echo "{CLOSING}"')

    assert lines[0].split()[:3] == ["--reruns", "1", "-rR"]


def test_ci_gives_each_part_of_tests_its_time(tmp_path: Path) -> None:
    begin = int(time.time())
    line = "echo $PDCLUSTER_TESTS_UNTIL; echo '{}'"
    _, lines = run_ci(tmp_path, test=line.format(CLOSING), apiserver=line.format(APISERVER))

    minutes = [(int(each) - begin) // 60 for each in (lines[0], lines[2])]
    assert minutes == [40, 62]


@pytest.mark.parametrize(("left_seconds", "closing"), [(60, "1 passed"), (-1, "1 skipped")])
def test_a_test_that_begins_after_the_time_of_its_part_is_skipped(
    tmp_path: Path, left_seconds: int, closing: str
) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\n@pytest.fixture\ndef slow():\n    print('begun')\n"
        "def test_one(slow):\n    pass\n"
    )
    command = (sys.executable, "-m", "pytest", "-rs", "-s", "-p", "tests.until", str(tmp_path))
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PDCLUSTER_TESTS_UNTIL": str(time.time() + left_seconds)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert closing in result.stdout.splitlines()[-1]
    assert ("begun" in result.stdout) == (left_seconds > 0)
    assert ("its part of .ci/run had used its time" in result.stdout) == (left_seconds < 0)


def test_ci_without_closing_line_fails_and_says_so(tmp_path: Path) -> None:
    status, lines = run_ci(tmp_path, test="echo no setup")

    assert status == 1
    assert "make test ended without pytest's closing line" in lines[-1]


CHECKS = {
    "format": "ruff format",
    "lint": "ruff check",
    "types": "mypy schema/src",
    "bench-types": "mypy bench",
    "imports": "lint-imports",
    "tests": "python scripts/check_tests",
    "words": "python scripts/check_words",
    "names": "python scripts/check_names",
    "sizes": "python scripts/check_sizes",
    "duplicates": "python scripts/check_duplicates",
    "chart": "make lint-chart",
    "crds": "python scripts/crds",
    "charts": "python scripts/chart_copies",
    "reference": "python scripts/reference",
    "cli": "python scripts/cli_page",
}
SLOW = {"types", "bench-types", "chart"}


@pytest.mark.parametrize(("options", "left_out"), [((), set()), (("--fast",), SLOW)])
def test_check_runs_every_tool(
    tmp_path: Path, options: tuple[str, ...], left_out: set[str]
) -> None:
    make_checks(tmp_path, "mypy" if left_out else "no tool")
    status, lines = run_check(tmp_path, *options)

    assert (status, lines[-1]) == (0, "check: all passed")
    assert [line.removeprefix("== ") for line in lines if line.startswith("==")] == [
        name for name in CHECKS if name not in left_out
    ]


@pytest.mark.parametrize(("name", "failing"), [*CHECKS.items()][:1] + [*CHECKS.items()][-1:])
def test_check_names_what_failed_after_running_all(tmp_path: Path, name: str, failing: str) -> None:
    make_checks(tmp_path, failing)
    status, lines = run_check(tmp_path)

    assert (status, lines[-1]) == (1, f"check: failed: {name}")
    assert "python scripts/cli_page.py --check" in lines
