"""Ends a run of `pdctl up` from another process: signals go to that process alone, by a
descriptor that outlives a reuse of its pid.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from pdcluster_api.errors import StartError
from pdctl.local.processes import DRAIN_SECONDS
from pdctl.local.run_directory import RunDirectory

DRAIN = signal.SIGUSR1
"""As one Ctrl-C, but a second of it does not hurry."""

_LAST_SECONDS = 30.0  # for workers that are killed, and etcd, after the drain
_POLL_SECONDS = 0.2
_CHILD_SECONDS = 5.0  # children are killed with their parent


def end_run(run: RunDirectory, poll: Callable[[], None], *, hurry: bool) -> None:
    """Drain it, or with `hurry` kill its workers, and wait until all of its processes have ended.

    poll: called while it waits
    Raises StartError where some did not end.
    """
    with _process(run) as descriptor:
        if descriptor is None:
            return
        children = psutil.Process(run.pid).children(recursive=True)
        # two signals of one number could arrive as one
        for number in (signal.SIGINT, signal.SIGTERM) if hurry else (DRAIN,):
            signal.pidfd_send_signal(descriptor, number)
        deadline = time.monotonic() + DRAIN_SECONDS + _LAST_SECONDS
        while not select.select([descriptor], [], [], _POLL_SECONDS)[0]:
            poll()
            if time.monotonic() > deadline:
                raise _not_ended(run, [run.pid])
        poll()
    _, left = psutil.wait_procs(children, timeout=_CHILD_SECONDS)
    if left:
        raise _not_ended(run, [child.pid for child in left])


@contextmanager
def _process(run: RunDirectory) -> Iterator[int | None]:
    """A descriptor of the run's own pdctl; None = it has ended."""
    try:
        descriptor = os.pidfd_open(run.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield descriptor if run.is_alive else None
    except PermissionError as e:
        message = f"process {run.pid} of {run.name} is another user's; end it as that user"
        raise StartError(message, exit_code=1) from e
    finally:
        os.close(descriptor)


def _not_ended(run: RunDirectory, pids: list[int]) -> StartError:
    numbers = " ".join(map(str, pids))
    return StartError(
        f"{run.name}: still running: process {numbers}; look at its logs in {run.logs}, and end "
        f"it with kill -9 {numbers}",
        exit_code=1,
    )
