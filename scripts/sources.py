"""The Python files that our own checks read: everything written by hand under the given folders.

What a check does with a file is its own business.
"""

from collections.abc import Sequence
from pathlib import Path


def python_files(folders: Sequence[Path]) -> list[Path]:
    """All hand-written .py files under the folders, sorted.

    Raises SystemExit(2) naming a folder that does not exist.
    """
    for folder in folders:
        if not folder.is_dir():
            print(
                f"{folder}: no such folder: run from the repository root, or name folders that "
                "exist"
            )
            raise SystemExit(2)
    return sorted({path for folder in folders for path in folder.rglob("*.py")})
