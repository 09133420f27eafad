"""Objects for tests, fresh for each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.schema.object_cases import minimal


@pytest.fixture
def document() -> dict[str, Any]:
    """A valid 1P1D object, free to be changed."""
    return minimal()


@pytest.fixture
def write_document(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Write an object to the one file of this test."""

    def write(content: dict[str, Any]) -> Path:
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write
