"""Ends a cluster and removes its files and control groups, and keeps its logs.

Needs nothing but the standard library, so that it also works where `.venv` is
gone.  Processes are found by their command and not by a file: with the
cluster's folder removed under it (`git clean -dfx`), a cluster still ends.
What is then left to remove is read from its mounts.
"""

import errno
import os
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from e2e.rig.own_root import with_own_root
from e2e.rig.paths import CACHE, Cluster
from e2e.rig.shell import CommandError, environment, run

END_SECONDS = 30.0
UPLINK = "to-second"  # interface of the first node
_ENDED = (errno.ENOENT, errno.ESRCH, errno.EINVAL)
"""Errors from the files of a process that is gone, going, or not collected by its parent."""

_STORE = re.compile(r"/of-(pdcluster-\d+) ")


def down(cluster: Cluster) -> None:
    """End the cluster's processes and remove its files and control groups; does nothing when there
    is none.  Raises CommandError.
    """
    for each in (cluster.second, cluster):
        _remove(each)


def lose_second(cluster: Cluster) -> None:
    """End the second node as a machine does that loses its power: nothing of it says good-bye.
    Its files stay.
    """
    holder = holder_of(cluster.second)
    if holder is None:
        raise CommandError(f"the cluster of {cluster.root} has no second node that runs")
    run(["nsenter", f"--net=/proc/{holder}/ns/net", "ip", "link", "delete", UPLINK])
    _end(cluster.second, holder)


def _remove(cluster: Cluster) -> None:
    holder = holder_of(cluster)
    groups = {cluster.control_group} if cluster.root.exists() else set()
    if holder is not None:
        if not cluster.root.exists():
            groups = _groups_of(holder)
            print(
                f"cluster: the files of {cluster.root} are gone: ending the processes that are "
                "left of it",
                flush=True,
            )
        _end(cluster, holder)
    for group in groups:
        run(
            with_own_root([sys.executable, "-m", "e2e.rig.control_groups", group]),
            environment=environment(),
        )
        shutil.rmtree(CACHE.containerd(group), ignore_errors=True)
    if cluster.root.exists():
        shutil.rmtree(cluster.root)


def is_running(cluster: Cluster) -> bool:
    """Return whether the process that holds the namespaces lives."""
    return holder_of(cluster) is not None


def holder_of(cluster: Cluster) -> int | None:
    """The process that holds the cluster's namespaces: it and all below it end together."""
    words = [b"e2e.rig.box", b"run", str(cluster.root).encode()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if command[0] == b"unshare" and any(
            command[start : start + 3] == words for start in range(len(command))
        ):
            return int(process.name)
    return None


def save_logs(cluster: Cluster, folder: Path) -> None:
    """Copy the logs of the components and of all containers to a folder, over what was there;
    nothing where there are none.

    Does not raise for a file: the earlier error is the one to report.
    """
    if cluster.log.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        try:
            # links to those in pods
            shutil.copytree(
                cluster.log, folder, symlinks=True, ignore=shutil.ignore_patterns("containers")
            )
        except (OSError, shutil.Error) as e:  # logs come and go while they are copied
            print(f"cluster: not every log was kept: {e}", file=sys.stderr)


def _end(cluster: Cluster, holder: int) -> None:
    for first in children(holder):
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while is_running(cluster):
        if time.monotonic() > deadline:
            raise CommandError(
                f"process {holder} holds the cluster's namespaces and did not end within "
                f"{END_SECONDS:.0f} s"
            )
        time.sleep(0.1)


def _groups_of(holder: int) -> set[str]:
    """The control group of a running cluster, by the store that it has mounted, whose name is the
    group's.
    """
    mounts = "".join(_text_of(child, "mountinfo") for child in children(holder))
    return set(_STORE.findall(mounts))


def children(process: int) -> list[int]:
    """Processes that it started and that run, with those that it took over."""
    return [int(child) for child in _text_of(process, f"task/{process}/children").split()]


def _text_of(process: int, file: str) -> str:
    """A file about a process; empty once it has ended."""
    try:
        return Path(f"/proc/{process}/{file}").read_text()
    except OSError as e:
        if e.errno not in _ENDED:
            raise
        return ""
