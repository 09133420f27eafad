"""Fixtures of the operator's tests.

Real here: etcd, processes, signals, files, TLS.  Not real: the worker program
           (pdctl/local/standin_worker.py).
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.operator.object_cases import minimal

ROOT = Path(__file__).parents[2]


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


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    """Poll until a predicate holds; fails with its description after a deadline."""

    async def wait(predicate: Callable[[], Any], describe: str, seconds: float = 120.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := predicate()):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {describe}"
            await asyncio.sleep(0.05)
        return value

    return wait
