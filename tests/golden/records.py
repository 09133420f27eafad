"""Records: what the tree answers today, byte for byte, in files beside the tests."""

import difflib
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parent

is_rewriting = False
"""Write records in place of comparing with them; set by `--golden-write`."""

changes: list[str] = []
"""Differences that a rewrite has written."""


def check(path: Path, text: str) -> None:
    """Compare a text, which ends with a newline, with its record."""
    kept = path.read_bytes().decode() if path.exists() else ""
    if kept == text:
        return
    name = str(path.relative_to(ROOT))
    lines = difflib.unified_diff(
        kept.splitlines(), text.splitlines(), f"{name} (record)", f"{name} (now)", lineterm=""
    )
    difference = "\n".join(lines) or f"{name}: line ends differ"
    if not is_rewriting:
        raise AssertionError(f"differs from its record (see CONTRIBUTING.md):\n{difference}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    changes.append(difference)


def check_names(folder: Path, names: Collection[str]) -> None:
    """No record is left that no test compares with; a rewrite deletes such."""
    stale = sorted({path.name for path in folder.glob("*")} - set(names))
    if is_rewriting:
        for name in stale:
            (folder / name).unlink()
            changes.append(f"{(folder / name).relative_to(ROOT)}: deleted")
    else:
        assert not stale, f"records of no test: {stale}"
