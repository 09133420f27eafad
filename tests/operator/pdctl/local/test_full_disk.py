"""`pdctl up` with its state on a disk without space: a small tmpfs, which it alone sees."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.operator.pdctl.run_of_up import READY, Run

_PRIVATE = ("unshare", "--mount", "sh", "-ec")
_PROBE = subprocess.run([*_PRIVATE, "mount -t tmpfs none /mnt"], check=False, capture_output=True)

pytestmark = pytest.mark.skipif(
    _PROBE.returncode != 0, reason="this user may not mount file systems"
)

_FIX = "free some space, or choose another folder with --state-dir"
_FULL = f"cannot be written: No space left on device; {_FIX}"


def with_space(size: str, state_dir: Path, used: str = "") -> tuple[str, ...]:
    """A program that runs another with a state folder of so many bytes.

    used: text of a file that is there already
    """
    script = 'mkdir -p "$1"; mount -t tmpfs -o size=$0 none "$1"; printf "$2" > "$1/used"; shift 2'
    return (*_PRIVATE, f'{script}; exec "$@"', size, str(state_dir), used)


@pytest.mark.parametrize(
    ("size", "used", "model", "message"),
    [
        ("4k", "x", "chat.yaml", f"chat: {_FULL}"),
        ("4k", "", "model", f"model/cluster.yaml: {_FULL}"),
        ("99m", "", "chat.yaml", f"chat: 103 MB are free, and etcd needs 128 MB; {_FIX}"),
    ],
)
def test_a_full_disk_is_named_before_processes_start(
    size: str, used: str, model: str, message: str, start: Callable[..., Run], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    file = tmp_path / model if model == "model" else None
    run = start(file=file, by=with_space(size, state, used))

    assert run.process.wait(60) == 1
    assert run.text().splitlines()[-1] == f"error: {state}/{message}"
    assert "ended with" not in run.text()


async def test_path_without_space_is_named_with_an_external_etcd(
    start: Callable[..., Run], document: dict[str, Any], tmp_path: Path
) -> None:
    """The scrape config, certificates and configs of workers, as the space grows."""
    first = start()
    await first.shows(READY)
    endpoints = (first.state() or {})["etcd"]["endpoints"]
    document["spec"]["discovery"] = {"etcd": {"endpoints": endpoints}}
    for size in ("12k", "40k", "48k"):
        run = start("--port", "0", by=with_space(size, tmp_path / "state"))
        assert run.process.wait(60) == 1
        error = run.text().splitlines()[-1]
        assert error.startswith(f"error: {tmp_path}/state/chat/run-")
        assert error.endswith(f": {_FULL}")
