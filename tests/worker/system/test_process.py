"""Settings of a process: its end with its parent and by SIGTERM, open files."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdcluster_worker.system.process import FILES_OF_RELAYED, allow_more_files, fitting
from tests.hub_server import HubServer
from tests.make_tiny_model import make_tiny_model
from tests.system.waiting import wait_for

END_SECONDS = 30.0
AS_FIRST = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def can_be_first() -> bool:
    """A PID namespace takes root, and a container may forbid it even then."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run([*AS_FIRST, "true"], capture_output=True, check=False).returncode == 0


as_first = pytest.mark.skipif(not can_be_first(), reason="needs root and PID namespaces")


@contextmanager
def first_process(*arguments: str, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    """`python -m ARGUMENTS` as process 1; the handle is of its parent, which ends
    with its status.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    process = subprocess.Popen(
        [*AS_FIRST, sys.executable, "-m", *arguments],
        env={**clean, **environment},
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def terminate(process: "subprocess.Popen[bytes]") -> None:
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGTERM)


def opened_by_a_reader(pipe: Path) -> int | None:
    """A descriptor to write to a pipe with, once it is being read."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as e:
        if e.errno == errno.ENXIO:
            return None
        raise


@as_first
def test_worker_that_reads_its_files_ends_with_143(tmp_path):
    """Its engine file is a pipe without a writer: a slow volume would hold it up likewise."""
    engine = tmp_path / "engine"
    os.mkfifo(engine)
    with first_process("pdcluster_worker", "--engine-config", str(engine)) as process:
        writer = wait_for(
            lambda: opened_by_a_reader(engine), END_SECONDS, "the worker reads its engine file"
        )
        terminate(process)
        assert process.wait(END_SECONDS) == 143
        os.close(writer)


@as_first
def test_download_ends_with_143_and_keeps_what_has_come(tmp_path):
    target = tmp_path / "models" / "tiny"
    with HubServer(make_tiny_model("llama", tmp_path / "repository")) as hub:
        hub.pause = 0.1
        options = ["--repo", "acme/tiny", "--target", str(target)]
        local = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
        with first_process("pdcluster_worker.fetch", *options, **local) as process:
            wait_for(
                lambda: hub.sent["model.safetensors"] > 64 << 10,
                END_SECONDS,
                "the download has begun",
            )
            terminate(process)
            assert process.wait(END_SECONDS) == 143
    parts = list((target.parent / ".tiny.partial").glob("*.part"))
    assert [part.name for part in parts] == ["model.safetensors.part"]
    assert not target.exists()


LIMIT = resource.RLIMIT_NOFILE


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = resource.getrlimit(LIMIT)
    yield
    resource.setrlimit(LIMIT, before)


def set_limit(files: int) -> None:
    resource.setrlimit(LIMIT, (files, resource.getrlimit(LIMIT)[1]))


@pytest.mark.parametrize(
    ("limit", "most", "files_each", "fits"),
    [
        (1024, 2048, 1, 768),  # the others are left for peers, etcd, the model
        (1024, 100, 1, 100),
        (1024, 2048, FILES_OF_RELAYED, 256),
        (200, 2048, FILES_OF_RELAYED, 1),
    ],
)
def test_connections_leave_files_for_others(limit, most, files_each, fits):
    set_limit(limit)
    assert fitting(most, files_each=files_each) == fits


def test_the_limit_is_raised_and_never_lowered():
    most = resource.getrlimit(LIMIT)[1]
    set_limit(1024)
    allow_more_files()
    raised = resource.getrlimit(LIMIT)
    assert raised == (most if 0 <= most < 65536 else 65536, most)

    allow_more_files()
    assert resource.getrlimit(LIMIT) == raised
