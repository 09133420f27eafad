"""Streams of a client in the cluster as they run: how many have begun, and how each one ended; and
metrics of a worker.
"""

import json
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from e2e.client_program import Stories
from e2e.harness import NAME, Json, Kubernetes
from tests.system.waiting import wait_for

URL = f"http://{NAME}:8000"


class Streams:
    """Output of the client program, read by a thread so that it never waits for its reader."""

    def __init__(self, program: "subprocess.Popen[str]", stories: Stories) -> None:
        self.stories = stories
        self.begun: set[int] = set()
        self.ended: list[Json] = []
        self._program = program
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def num_open(self) -> int:
        """Streams in their middle."""
        return len(self.begun - {answer["index"] for answer in list(self.ended)})

    def wait_begun(self, count: int, timeout_seconds: float) -> None:
        """Return when that many streams have their first token."""
        wait_for(
            lambda: len(self.begun) >= count,
            timeout_seconds,
            lambda: f"{count} streams to begin; there are {len(self.begun)}",
        )

    def wait_ended(self, timeout_seconds: float) -> list[Json]:
        """Every answer, when the program has ended."""
        self._reader.join(timeout_seconds)
        assert not self._reader.is_alive(), (
            f"{self.num_open} streams are still open after {timeout_seconds} s"
        )
        assert self._program.wait(timeout_seconds) == 0
        return self.ended

    def close(self) -> None:
        """Return when nothing reads any more; the program has to be at its end."""
        self._reader.join()

    def _read(self) -> None:
        assert self._program.stdout is not None
        for line in self._program.stdout:
            said = json.loads(line)
            if "begun" in said:
                self.begun.add(said["index"])
            else:
                self.ended.append(said)


@contextmanager
def streams(cluster: Kubernetes, stories: Stories, url: str = URL) -> Iterator[Streams]:
    """Begin them; the client is killed when the block is left before they have ended."""
    with cluster.load("streams", url, json.dumps(asdict(stories))) as program:
        opened = Streams(program, stories)
        try:
            yield opened
        finally:
            program.kill()
            opened.close()


def cut(answers: list[Json], stories: Stories) -> list[Json]:
    """The answers that are not whole; their tokens are left out, so that the message stays
    readable.
    """
    return [
        {**answer, "tokens": len(answer["tokens"])}
        for answer in answers
        if answer["status"] != 200
        or not answer["done"]
        or answer["error"]
        or len(answer["tokens"]) != stories.max_tokens
    ]


def metric(cluster: Kubernetes, pod: Json, name: str) -> float:
    """Sum of a metric over its labels, scraped from the pod's own address.

    Fails when the pod has no such metric.
    """
    samples = _samples(cluster, pod, name)
    assert samples, f"{pod['metadata']['name']} has no metric {name}"
    return sum(value for _, value in samples)


def by_rank(cluster: Kubernetes, pod: Json, name: str) -> Counter[str]:
    """The same by the number of the engine, of a counter that has no other label."""
    samples = _samples(cluster, pod, name)
    ranks = {labels.partition('engine="')[2].partition('"')[0]: int(n) for labels, n in samples}
    return Counter(ranks)


def _samples(cluster: Kubernetes, pod: Json, name: str) -> list[tuple[str, float]]:
    (page,) = cluster.ask("get", f"http://{pod['status']['podIP']}:8000/metrics")
    assert page["status"] == 200
    found = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", page["text"], re.MULTILINE)
    return [(labels, float(value)) for labels, value in found]
