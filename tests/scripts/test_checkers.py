"""The checkers of `make check` on small trees: good files pass, each breach is named by place."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FIVE = "one, two, three, four, five"
DOC = '"""Doc."""\n'


def run_script(name: str, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    """A script of scripts/, run from the root of the repository as `make check` runs it."""
    command = [sys.executable, ROOT / "scripts" / name, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )


def function(num_lines: int) -> str:
    return "def long() -> None:\n" + "    step()\n" * (num_lines - 1)


def module(num_lines: int) -> str:
    return DOC + "x = 1\n" * (num_lines - 1)


def body(num_lines: int, name: str = "step") -> str:
    return "".join(f"    {name}({n})\n" for n in range(num_lines))


def copies(num_lines: int) -> dict[str, str]:
    return {f"{name}.py": f"def {name}():\n{body(num_lines)}" for name in "ab"}


WITHOUT_CODE = '"""Doc.\n' + "word\n" * 12 + '"""\n' + "import module\n" * 12 + "# comment\n" * 12
PASSING = [
    ("sizes", {"a.py": module(400)}),
    ("sizes", {"a.py": DOC + function(60)}),
    ("sizes", {"a.py": f"{DOC}def plain({FIVE}, *, six, seven): ...\n"}),
    ("sizes", {"a.py": f"{DOC}class Owner:\n    def method(self, {FIVE}): ...\n"}),
    ("sizes", {"a.py": f"{DOC}@triton.jit\ndef kernel({FIVE}, six): ...\n"}),
    ("duplicates", copies(9)),
    ("duplicates", {f"{n}.py": f"{WITHOUT_CODE}def {n}():\n{body(3, n)}" for n in "ab"}),
    ("names", {"prefill.py": "class Migration:\n    bootstrap_room = is_saved = 1\n"}),
    ("tests", {"operator/test_a.py": "import pdctl\nfrom tests.operator.pods import pod\n"}),
    ("tests", {"worker/test_a.py": "from pdcluster_worker import config\nimport pytest_asyncio\n"}),
    ("tests", {"contract/test_a.py": "import pdcluster_api\nimport pdcluster_worker\n"}),
    ("tests", {"certificates.py": "import pdcluster_operator\nimport pdcluster_worker\n"}),
    (
        "words",
        {
            "a.py": '"""Drain pods."""\n\n\ndef told_pods(wish: int) -> str:\n'
            '    """Return whether a pod is retold."""\n'
            '    return f"pods {wish}" + "told"  # a user who asks\n'
        },
    ),
]


def write(tree: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)


@pytest.mark.parametrize(("checker", "files"), PASSING)
def test_what_is_allowed_passes(tmp_path: Path, checker: str, files: dict[str, str]) -> None:
    write(tmp_path, files)
    result = run_script(f"check_{checker}.py", tmp_path)

    assert (result.returncode, result.stdout.splitlines()[:-1]) == (0, [])


BREACHES = [
    ("sizes", "a.py", module(401), "1: file has 401 lines, limit 400"),
    ("sizes", "a.py", f"{DOC}\n{function(61)}", "3: function long has 61 lines, limit 60"),
    ("sizes", "a.py", f"{DOC}def wide({FIVE}, six): ...\n", "2: function wide has 6 positional"),
    ("sizes", "a.py", f"{DOC}class A:\n    def f(self, {FIVE}, six): ...\n", "3: function f has 6"),
    ("sizes", "a.py", "x = 1\n", "1: no module docstring"),
    ("sizes", "a.py", f"{DOC}def broken(:\n", "2: not valid Python"),
    ("duplicates", "a.py", f"def a():\n{body(12)}def b():\n{body(12)}", "2: 12 lines equal those"),
    ("duplicates", "a.py", "x = 1\ndef broken(:\n", "2: not valid Python"),
    ("names", "a.py", "num_wanted = 1", "1: num_wanted has wanted: use"),
    ("names", "a.py", "\nclass SeatTaken: ...", "2: SeatTaken has seat: use"),
    ("names", "crowd.py", "", "1: the file's name has crowd: use"),
    ("names", "a.py", "class Step: ...\nclass Step: ...", "2: class Step is defined in "),
    ("tests", "worker/test_a.py", "from tests.worker.test_b import X, Y", "1: imports tests.work"),
    ("tests", "helper.py", "import tests.worker.test_b", "1: imports tests.worker.test_b, a test"),
    ("tests", "operator/test_a.py", "import pdcluster_worker.config", "1: tests/operator imports"),
    ("tests", "worker/test_a.py", "import pdctl.main", "1: tests/worker imports pdctl"),
    ("tests", "schema/test_a.py", "import pdcluster_api", "1: tests/schema imports pdcluster_api"),
    (
        "tests",
        "system/test_a.py",
        "import pdcluster_api\nimport pdcluster_worker",
        "2: a test of the operator imports pdcluster_worker",
    ),
    ("words", "a.py", '"""Pods.\n\nNobody asks."""\n', '3: "nobody" is a private word'),
    ("words", "a.py", f"{DOC}x = 1  # made anew\n", '2: "anew" is a private word'),
    ("words", "a.py", f'{DOC}x = "it was told"\n', '2: "told" is a private word'),
    ("words", "a.py", f"{DOC}def test_pods_are_put_back(): ...\n", '2: "put back" is a private'),
    ("words", "a.py", '"""Waits for\never."""\n', '1: "for ever" is a private word'),
    ("words", "a.py", f'{DOC}def f():\n    """Why, by pod."""\n', '3: docstring opens with "Why"'),
    ("words", "page.md", "# Pods\n\nA pod who waits.\n", '3: "who" is a private word'),
    ("words", "a.yaml", "a:\n  description: Whether so.\n", '2: description opens with "Whether"'),
    ("words", "values.yaml", "replicas: 1 # besides others\n", '1: "besides" is a private word'),
]


@pytest.mark.parametrize(("checker", "name", "source", "problem"), BREACHES)
def test_each_breach_is_named(
    tmp_path: Path, checker: str, name: str, source: str, problem: str
) -> None:
    write(tmp_path, {name: source})
    result = run_script(f"check_{checker}.py", tmp_path)

    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / name}:{problem}")
    assert lines[-1] == f"check_{checker}: 1 files, 1 problems"
    assert result.returncode == 1


def test_sizes_of_missing_folder_are_an_error(tmp_path: Path) -> None:
    result = run_script("check_sizes.py", tmp_path / "nowhere")

    assert "nowhere: no such folder" in result.stdout
    assert result.returncode == 2


@pytest.mark.parametrize("num_lines", [10, 25])
def test_copies_are_reported_once_with_both_places(tmp_path: Path, num_lines: int) -> None:
    write(tmp_path, copies(num_lines) | {"broken.py": "def broken(:\n"})
    (tmp_path / "b.py").write_text("x = 1\n\n\n" + (tmp_path / "b.py").read_text())
    result = run_script("check_duplicates.py", tmp_path)

    places = f"{tmp_path / 'a.py'}:2: {num_lines} lines equal those at {tmp_path / 'b.py'}:5"
    assert places in result.stdout
    assert "3 files, 2 problems" in result.stdout


def test_copies_are_seen_through_comments_blanks_and_spacing(tmp_path: Path) -> None:
    loose = body(10).replace("(", "( ").replace("\n", "  # comment\n\n")
    write(tmp_path, {"a.py": f"def a():\n{body(10)}", "b.py": f"class B:\n  def b():\n{loose}"})

    assert run_script("check_duplicates.py", tmp_path).returncode == 1
