"""The first moments of a worker's two processes: what is imported when, and an end before anything
serves.
"""

import asyncio
import logging
import subprocess
import sys

import pytest

from pdcluster_worker.serving.engines.child import EngineChild


@pytest.mark.parametrize(
    ("module", "later"),
    [
        ("processes.worker_start", ("starlette", "grpc", "prometheus_client", "torch")),
        ("processes.engine_process", ("transformers",)),
    ],
)
def test_what_a_process_does_not_import_before_it_starts(module, later):
    program = (
        f"import sys, pdcluster_worker.{module}; print([name for name in {later!r} if name in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"


async def test_an_engine_that_still_loads_is_ended_without_a_wait(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    child = EngineChild(tmp_path / "no-such-file", {})
    await child.start()
    assert child.client.is_loading
    await asyncio.wait_for(child.stop(), 60)
    assert "did not stop" not in caplog.text  # it was not asked, and so not waited for
