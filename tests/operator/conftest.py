"""Fixtures of the operator's tests.

Real here: etcd, processes, signals, files, TLS.  Not real: the worker program
           (pdctl/local/standin_worker.py).
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.schema.conftest import document, write_document

__all__ = ["document", "wait_until", "write_document"]


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
