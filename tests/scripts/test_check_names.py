"""The name checker on small trees: what it takes, and what it names."""

from pathlib import Path

import pytest

from tests.scripts.checker import run_script


def test_names_of_the_field_pass(tmp_path: Path) -> None:
    (tmp_path / "prefill.py").write_text("class Migration:\n    bootstrap_room = is_saved = 1\n")

    result = run_script("check_names.py", tmp_path)

    assert (result.stdout, result.returncode) == ("check_names: 1 files, 0 problems\n", 0)


@pytest.mark.parametrize(
    ("name", "source", "problem"),
    [
        ("a.py", "num_wanted = num_wanted_now = 1", "a.py:1: num_wanted has wanted: use"),
        ("a.py", "\nclass SeatTaken: ...", "a.py:2: SeatTaken has seat: use"),
        ("crowd.py", "", "crowd.py:1: the file's name has crowd: use"),
        ("a.py", "class Step: ...\nclass Step: ...", "a.py:2: class Step is defined in "),
    ],
)
def test_a_private_word_and_a_second_class_of_a_name_fail(
    tmp_path: Path, name: str, source: str, problem: str
) -> None:
    (tmp_path / name).write_text(source)

    result = run_script("check_names.py", tmp_path)

    assert f"{tmp_path}/{problem}" in result.stdout
    assert result.returncode == 1
