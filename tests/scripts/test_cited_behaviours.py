"""docs/behaviours.md explains exactly the ids that the tree cites."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEHAVIOURS = ROOT / "docs" / "behaviours.md"


def test_behaviours_lists_exactly_the_cited_ids() -> None:
    files = subprocess.run(
        ["git", "ls-files", "-z", "operator", "worker", "tests", "docs", "bench", "crds"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    others = [
        path
        for name in files.stdout.split("\0")
        if (path := ROOT / name).is_file() and path != BEHAVIOURS and path.suffix != ".png"
    ]
    cited = {
        found
        for path in others
        for found in re.findall(
            r"(?<=\[)[VOLYNSARD]\d+(?=\])|\bT\d+\b", path.read_text(errors="replace")
        )
    }
    explained = re.findall(r"^\| \[?([A-Z]\d+)\]? \|", BEHAVIOURS.read_text(), re.MULTILINE)

    assert sorted(explained) == sorted(cited)
