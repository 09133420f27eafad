"""The tests of the operator's distribution lie in the folders of the sources that they test."""

from tests.conftest import ROOT


def test_every_folder_of_tests_is_a_room_of_the_sources():
    tests, sources = ROOT / "tests" / "operator", ROOT / "operator" / "src"
    folders = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")}

    assert len(folders) > 20
    assert [str(folder) for folder in sorted(folders) if not (sources / folder / "__init__.py").is_file()] == []
