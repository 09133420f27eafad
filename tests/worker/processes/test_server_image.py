"""The image without an engine: the server process, the router and the download import nothing that
it leaves out.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pdcluster_worker.errors import ConfigError
from pdcluster_worker.processes import worker_start

ROOT = Path(__file__).parents[3]
LEFT_OUT = re.findall(
    r'server\) backend= excluded="(.*?)"', (ROOT / "Dockerfile.worker").read_text()
)[0].split()
IMPORTED = (
    "pdcluster_worker.__main__",
    "pdcluster_worker.processes.worker_start",
    "pdcluster_worker.processes.server_process",
    "pdcluster_worker.processes.router_process",
    "pdcluster_worker.fetch.__main__",
)


def test_server_process_imports_nothing_that_its_image_leaves_out():
    script = f"import sys; sys.modules.update(dict.fromkeys({LEFT_OUT!r})); import " + ", ".join(
        IMPORTED
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_worker_of_our_own_engine_says_which_image_it_needs(monkeypatch):
    monkeypatch.setattr(worker_start, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="use the variant cpu or cuda of the worker's image"):
        worker_start._check_image()
