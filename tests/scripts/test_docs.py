"""Pages agree with the tree: links lead somewhere, tests that are named exist, notes are in the
index.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "bench/results")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(file for name in FOLDERS for file in (ROOT / name).rglob("*.md"))]
)
NOTES = sorted(path for path in (ROOT / "docs" / "design").glob("*.md") if path.name != "README.md")
ROOM_PAGES = (
    "architecture.md",
    "drain.md",
    "extending.md",
    "gpu.md",
    "http-limits.md",
    "kv-blocks.md",
    "stalled-engine.md",
)
PARTS = ("Question", "Decision", "Alternatives", "What would change our mind")


def links(text: str) -> Iterator[tuple[str, str]]:
    """Path and anchor of every link inside the repository; an empty path is the page itself."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    assert [problem for page in PAGES for problem in broken(page)] == []


def broken(page: Path) -> Iterator[str]:
    for path, anchor in links(page.read_text()):
        target = page.parent / path if path else page
        if not target.exists():
            yield f"{page.name}: {path}"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
            yield f"{page.name}: {path}#{anchor}"


def test_pages_name_a_behaviour_and_never_its_id() -> None:
    others = [page for page in PAGES if page.name not in ("behaviours.md", "CONTRIBUTING.md")]
    cited = {page.name: re.findall(r"\[[VOLYNSARD]\d+\]", page.read_text()) for page in others}

    assert {name: ids for name, ids in cited.items() if ids} == {}


def test_tests_that_the_page_on_drains_names_exist() -> None:
    named = set(re.findall(r"\btest_\w+", (ROOT / "docs" / "drain.md").read_text()))
    there = {
        path.stem for folder in ("tests", "e2e") for path in (ROOT / folder).rglob("test_*.py")
    }

    assert len(named) > 20
    assert named - there == set()


def test_rooms_and_modules_that_pages_name_are_there() -> None:
    roots = [ROOT, *ROOT.glob("*/src"), *ROOT.glob("*/src/*")]
    named = {
        (page, path.rstrip("/"))
        for page in ROOM_PAGES
        for path in re.findall(r"`([a-z_]+(?:/[a-z_]+)+/?)`", (ROOT / "docs" / page).read_text())
    }

    assert len(named) > 40
    assert [
        (page, path)
        for page, path in sorted(named)
        if not any((root / path).exists() or (root / f"{path}.py").exists() for root in roots)
    ] == []


def test_index_of_the_design_notes_has_every_one_once() -> None:
    index = (ROOT / "docs" / "design" / "README.md").read_text()
    listed = re.findall(r"^\| \[([\w-]+\.md)\]\(\1\) \|", index, re.MULTILINE)

    assert sorted(listed) == [path.name for path in NOTES]


def test_the_site_has_a_place_for_every_page_once() -> None:
    """`make docs` checks it too, with packages of its own."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]

    assert sorted(listed) == sorted(page.as_posix() for page in pages)


@pytest.mark.parametrize("note", NOTES, ids=lambda path: path.stem)
def test_a_design_note_has_its_four_parts_and_is_short(note: Path) -> None:
    text = note.read_text()

    assert [part for part in PARTS if f"**{part}.**" not in text] == []
    assert len(text.split()) < 700
