"""The size checker on small trees: a good one passes, each limit is named when it is passed."""

from pathlib import Path

import pytest

from tests.scripts.checker import run_script

FIVE = "one, two, three, four, five"


def function(num_lines: int) -> str:
    return "def long() -> None:\n" + "    step()\n" * (num_lines - 1)


def module(num_lines: int) -> str:
    return '"""Doc."""\n' + "x = 1\n" * (num_lines - 1)


def test_sizes_at_their_limits_pass(tmp_path: Path) -> None:
    (tmp_path / "lines.py").write_text(module(400))
    (tmp_path / "function.py").write_text('"""Doc."""\n' + function(60))
    (tmp_path / "parameters.py").write_text(
        '"""Doc."""\n'
        f"def plain({FIVE}, *, six, seven): ...\n"
        f"class Owner:\n    def method(self, {FIVE}): ...\n"
        f"    @classmethod\n    def build(cls, {FIVE}): ...\n"
        f"    @staticmethod\n    def free({FIVE}): ...\n"
        f"@triton.jit\ndef kernel({FIVE}, six): ...\n"
        f"@triton.jit(debug=True)\ndef other({FIVE}, six): ...\n"
    )

    result = run_script("check_sizes.py", tmp_path)

    assert result.stdout == "check_sizes: 3 files, 0 problems\n"
    assert result.returncode == 0


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        pytest.param(module(401), "1: file has 401 lines, limit 400", id="file"),
        pytest.param(
            '"""Doc."""\n\n' + function(61),
            "3: function long has 61 lines, limit 60",
            id="function",
        ),
        pytest.param(
            '"""Doc."""\nasync ' + function(61),
            "2: function long has 61 lines, limit 60",
            id="async function",
        ),
        pytest.param(
            f'"""Doc."""\ndef wide({FIVE}, six): ...\n',
            "2: function wide has 6 positional parameters, limit 5",
            id="parameters",
        ),
        pytest.param(
            f'"""Doc."""\ndef wide(zero, /, {FIVE}): ...\n',
            "2: function wide has 6 positional parameters, limit 5",
            id="positional only",
        ),
        pytest.param(
            f'"""Doc."""\nclass Owner:\n    def wide(self, {FIVE}, six): ...\n',
            "3: function wide has 6 positional parameters, limit 5",
            id="method",
        ),
        pytest.param(
            f'"""Doc."""\nclass Owner:\n    @staticmethod\n    def wide({FIVE}, six): ...\n',
            "4: function wide has 6 positional parameters, limit 5",
            id="static method",
        ),
        pytest.param("x = 1\n", "1: no module docstring", id="no docstring"),
        pytest.param("", "1: no module docstring", id="empty file"),
        pytest.param('"""Doc."""\ndef broken(:\n', "2: not valid Python", id="syntax"),
    ],
)
def test_sizes_over_a_limit_fail_with_place_value_and_limit(
    tmp_path: Path, source: str, problem: str
) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)

    result = run_script("check_sizes.py", tmp_path)

    assert f"{path}:{problem}" in result.stdout
    assert "check_sizes: 1 files, 1 problems" in result.stdout
    assert result.returncode == 1


def test_sizes_leave_generated_code_out(tmp_path: Path) -> None:
    for name in ("worker_pb2.py", "worker_pb2_grpc.py"):
        (tmp_path / name).write_text(module(401))

    assert run_script("check_sizes.py", tmp_path).stdout == "check_sizes: 0 files, 0 problems\n"


def test_sizes_of_missing_folder_are_an_error(tmp_path: Path) -> None:
    result = run_script("check_sizes.py", tmp_path / "nowhere")

    assert "nowhere: no such folder" in result.stdout
    assert result.returncode == 2
