"""The tests of the operator's distribution lie in the folders of their sources, and are named where
they are.
"""

import re

from tests.conftest import ROOT

NAMED = re.compile(r"(?<![\w/])tests/[\w/]*\w(?:\.py)?")


def test_every_folder_of_tests_is_a_room_or_a_module_of_the_sources():
    tests, sources = ROOT / "tests" / "operator", ROOT / "operator" / "src"
    folders = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")}

    assert len(folders) > 20
    assert [
        str(folder)
        for folder in sorted(folders)
        if not (sources / folder / "__init__.py").is_file()
        and not (sources / f"{folder}.py").is_file()
    ] == []


def test_every_path_of_tests_that_is_named_is_there():
    pages = [
        ROOT / "CONTRIBUTING.md",
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/design/*.md"),
        *ROOT.glob("operator/src/**/*.py"),
    ]
    named = {
        (page.relative_to(ROOT).as_posix(), path)
        for page in pages
        for path in NAMED.findall(page.read_text())
    }

    assert len(named) > 10
    assert (
        sorted(
            (page, path)
            for page, path in named
            if not any((ROOT / f"{path}{end}").exists() for end in ("", ".py"))
        )
        == []
    )
