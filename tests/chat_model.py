"""The sample chat model as `make model` leaves it, for the tests that need a real one.

Its folder is a constant, the one of the Makefile and the examples.  A test
without it fails, because a skipped one would be taken for a passed one.
"""

from pathlib import Path

import pytest

FOLDER = Path.home() / ".cache" / "pdcluster" / "smollm2-135m-instruct"


def chat_model(folder: Path = FOLDER) -> Path:
    """The folder; fails the test unless it is complete."""
    if not (folder / ".ready").exists():
        pytest.fail(f"{folder} is not complete: run `make model`")
    return folder
