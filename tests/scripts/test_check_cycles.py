"""The check for circles of files on small trees."""

from pathlib import Path

from tests.scripts.checker import run_script


def test_a_tree_without_a_circle_passes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\nfrom b import name\n")
    (tmp_path / "b.py").write_text("name = 1\n")

    result = run_script("check_cycles.py", tmp_path)

    assert (result.stdout, result.returncode) == ("check_cycles: 2 files, no circle\n", 0)


def test_files_that_import_each_other_fail(tmp_path: Path) -> None:
    (tmp_path / "rooms").mkdir()
    (tmp_path / "rooms" / "__init__.py").write_text("from rooms import a\n")
    (tmp_path / "rooms" / "a.py").write_text("def late():\n    from b import name\n")
    (tmp_path / "b.py").write_text("import rooms\n")

    result = run_script("check_cycles.py", tmp_path)

    assert result.returncode == 1
    assert "rooms.a" in result.stdout
    assert "b" in result.stdout
