"""The duplicate checker on small trees: what counts as a copy, and that each is reported once with
both places.
"""

from pathlib import Path

from tests.scripts.checker import run_script


def body(num_lines: int, name: str = "step") -> str:
    return "".join(f"    {name}({n})\n" for n in range(num_lines))


def test_duplicates_of_nine_lines_pass(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def a():\n" + body(9))
    (tmp_path / "b.py").write_text("def b():\n" + body(9))

    result = run_script("check_duplicates.py", tmp_path)

    assert result.stdout == "check_duplicates: 2 files, 0 problems\n"
    assert result.returncode == 0


def test_duplicates_of_ten_lines_fail_with_both_places(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def a():\n" + body(10))
    (tmp_path / "b.py").write_text("x = 1\n\n\ndef b():\n" + body(10))

    result = run_script("check_duplicates.py", tmp_path)

    assert f"{tmp_path / 'a.py'}:2: 10 lines equal those at {tmp_path / 'b.py'}:5" in result.stdout
    assert result.returncode == 1


def test_duplicates_longer_run_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def a():\n" + body(25))
    (tmp_path / "b.py").write_text("def b():\n" + body(25))

    result = run_script("check_duplicates.py", tmp_path)

    assert "a.py:2: 25 lines equal" in result.stdout
    assert "2 files, 1 problems" in result.stdout


def test_duplicates_within_one_file_fail(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def a():\n" + body(12) + "def b():\n" + body(12))

    result = run_script("check_duplicates.py", tmp_path)

    assert f"a.py:2: 12 lines equal those at {tmp_path / 'a.py'}:15" in result.stdout
    assert result.returncode == 1


def test_duplicates_are_seen_through_comments_blanks_and_spacing(tmp_path: Path) -> None:
    loose = body(10).replace("(", "( ").replace("\n", "  # why\n\n")
    (tmp_path / "a.py").write_text("def a():\n" + body(10))
    (tmp_path / "b.py").write_text("class B:\n  def b():\n" + loose)

    assert run_script("check_duplicates.py", tmp_path).returncode == 1


def test_duplicates_of_imports_docstrings_and_comments_pass(tmp_path: Path) -> None:
    shared = (
        '"""Doc.\n'
        + "word\n" * 12
        + '"""\n'
        + "".join(f"import module_{n}\n" for n in range(12))
        + "# why\n" * 12
    )
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f"{shared}def {name}():\n{body(3, name)}")

    assert run_script("check_duplicates.py", tmp_path).returncode == 0


def test_duplicates_leave_generated_code_out(tmp_path: Path) -> None:
    for name in ("a_pb2.py", "b_pb2.py"):
        (tmp_path / name).write_text("def a():\n" + body(10))

    assert run_script("check_duplicates.py", tmp_path).returncode == 0


def test_duplicates_of_broken_file_are_a_problem_and_others_still_compared(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ndef broken(:\n")
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f"def {name}():\n" + body(10))

    result = run_script("check_duplicates.py", tmp_path)

    assert f"{tmp_path / 'broken.py'}:2: not valid Python" in result.stdout
    assert "a.py:2: 10 lines equal" in result.stdout
    assert result.returncode == 1
