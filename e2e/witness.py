"""Record of pods that are gone: their logs and the sizes of StatefulSets, taken down as they come.

Log lines carry the node's clock, sizes the time at which they came here.  On
one machine a size that comes before a line was written before it.
"""

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial

from e2e.harness import SELECTOR, Kubernetes
from tests.system.waiting import wait_for

_STATE = re.compile(r"state=(\w+) active=\d+ holding=(\d+)")
LISTEN_SECONDS = 30.0


class Witness:
    """sizes: (seconds, StatefulSet, replicas) as they came; lines: (seconds, line) of each pod that
    is followed.
    """

    def __init__(self, pods: list[str]) -> None:
        self.sizes: list[tuple[float, str, int]] = []
        self.lines: dict[str, list[tuple[float, str]]] = {pod: [] for pod in pods}

    def states(self, pod: str) -> list[tuple[float, str, int]]:
        """(seconds, state, how many things it waited for) of a worker, in order."""
        found = ((at, _STATE.search(line)) for at, line in list(self.lines[pod]))
        return [(at, match[1], int(match[2])) for at, match in found if match]

    def drained_at(self, pod: str) -> float:
        """Time when it had drained for good.  Fails unless it was draining before."""
        states = self.states(pod)
        names = [state for _, state, _ in states]
        assert "draining" in names, f"{pod} was never draining: {states}"
        assert names[-1] == "drained", f"{pod} has not drained: {states}"
        return states[-1][0]

    def shrunk_at(self, pod: str) -> float:
        """Time when its StatefulSet was first seen without room for it."""
        workload, _, ordinal = pod.rpartition("-")
        return next(
            at for at, name, replicas in self.sizes if name == workload and replicas <= int(ordinal)
        )

    def hear_size(self, line: str) -> None:
        name, replicas = line.split()
        self.sizes.append((time.time(), name, int(replicas)))

    def hear_line(self, pod: str, line: str) -> None:
        at, _, text = line.partition(" ")
        self.lines[pod].append((datetime.fromisoformat(at).timestamp(), text))


@contextmanager
def witness(cluster: Kubernetes, pods: list[str]) -> Iterator[Witness]:
    """Follow the StatefulSets of the example, and the logs of these pods to their end or that of
    the block.
    """
    seen = Witness(pods)
    columns = "--output=custom-columns=:.metadata.name,:.spec.replicas"
    with ExitStack() as stack:
        watch = (
            "get",
            "statefulsets",
            f"--selector={SELECTOR}",
            "--watch",
            "--no-headers",
            columns,
        )
        _listen(stack, cluster.start(*watch), seen.hear_size)
        for pod in pods:
            follow = ("logs", pod, "--container=worker", "--follow", "--timestamps")
            _listen(stack, cluster.start(*follow), partial(seen.hear_line, pod))
        wait_for(
            lambda: seen.sizes and all(seen.lines.values()), LISTEN_SECONDS, "kubectl to follow"
        )
        yield seen


def _listen(
    stack: ExitStack, process: "subprocess.Popen[str]", hear: Callable[[str], None]
) -> None:
    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            hear(line.rstrip("\n"))

    thread = threading.Thread(target=read, daemon=True)
    stack.enter_context(process)
    stack.callback(thread.join)
    stack.callback(process.kill)
    thread.start()
