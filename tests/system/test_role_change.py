"""Workers that change their role by a command: the process and its weights are the same, no request
fails, and no token differs.

Two prefill and two decode workers, of which one of each changes.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.system.cluster import Cluster, NewCluster
from tests.system.load import Load, Outcome
from tests.system.waiting import wait_for
from tests.system.worker_process import SETTLE_SECONDS, WorkerProcess

PREFILL, DECODE = "prefill-0", "decode-0"
TO_DECODE, TO_PREFILL = "prefill-1", "decode-1"
LEASE_SECONDS = 10
MAX_TOKENS = 100
PLACES = ("auto", "local", "remote")


@dataclass(frozen=True)
class Fleet:
    cluster: Cluster

    def __getitem__(self, name: str) -> WorkerProcess:
        return self.cluster.workers[name]

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Both have the other role within the block."""
        with self.commanded():
            self.wait_roles(decode=TO_DECODE, prefill=TO_PREFILL)
            yield
        self.wait_roles(decode=TO_PREFILL, prefill=TO_DECODE)

    @contextmanager
    def commanded(self) -> Iterator[None]:
        try:
            self.cluster.command_role(TO_PREFILL, "prefill")
            self.cluster.command_role(TO_DECODE, "decode")
            yield
        finally:
            self.cluster.command_role(TO_PREFILL, None)
            self.cluster.command_role(TO_DECODE, None)

    def wait_roles(self, *, decode: str, prefill: str) -> None:
        """Wait until the others use them, too."""
        self.cluster.wait_role(decode, "decode")
        self.cluster.wait_role(prefill, "prefill")
        wait_for(self._is_connected, SETTLE_SECONDS, "decode-0 knows all three")

    def _is_connected(self) -> bool:
        peers = self[DECODE].metrics()
        return (
            peers.value("peers", role="prefill", state="ready") == 2
            and peers.value("peers", role="decode", state="ready") == 1
        )


@pytest.fixture(scope="module")
def fleet_cluster(open_cluster: NewCluster) -> Iterator[Fleet]:
    with open_cluster("roles") as cluster:
        cluster.lease_seconds = LEASE_SECONDS
        for name in (PREFILL, TO_DECODE, DECODE, TO_PREFILL):
            # one after the other: all at once they take longer to load
            cluster.add_worker(name.partition("-")[0], name).wait_ready()
        yield Fleet(cluster)


@pytest.fixture
def fleet(fleet_cluster: Fleet) -> Iterator[Fleet]:
    fleet_cluster.cluster.heal()
    yield fleet_cluster
    fleet_cluster.cluster.wait_settled()


async def test_roles_change_under_load_and_back_without_a_failed_request(fleet, prompts, reference):
    decodes = {name: fleet[name] for name in (DECODE, TO_PREFILL)}
    pids = {
        name: (fleet[name].process.pid, fleet[name].engine_pid) for name in fleet.cluster.workers
    }
    load = Load(decodes, MAX_TOKENS)

    def some(count: int) -> list[Outcome]:
        return [
            Outcome(prompts(20 + 15 * number), ingress, PLACES[number % 3])
            for number in range(count)
            for ingress in decodes
        ]

    asking = asyncio.create_task(load.run(some(10)))
    await load.wait_for(lambda: sum(each.num_tokens > 0 for each in load.outcomes) >= 6)
    with fleet.commanded():
        # some of these come while the workers drain, and some in their other roles
        await load.run(some(6))
        await asyncio.to_thread(fleet.wait_roles, decode=TO_DECODE, prefill=TO_PREFILL)
        await load.run(some(4))
    await load.run(some(6))
    await asking
    await asyncio.to_thread(fleet.wait_roles, decode=TO_PREFILL, prefill=TO_DECODE)

    assert [each for each in load.outcomes if not each.done or each.num_tokens != MAX_TOKENS] == []
    for outcome in load.outcomes:
        reference.check_whole(outcome.prompt, outcome.stream.tokens)
    for name, (pid, engine_pid) in pids.items():
        assert (fleet[name].process.pid, fleet[name].engine_pid) == (pid, engine_pid)
    for name, own, other in (
        (TO_PREFILL, "decode", "prefill"),
        (TO_DECODE, "prefill", "decode"),
    ):
        metrics = fleet[name].metrics()
        assert metrics.by_label("role_info", "role") == {own: 1}
        assert metrics.value("role_changes_total", role=other) >= 1
        assert metrics.value("role_changes_total", role=own) >= 1


def test_worker_does_the_work_of_its_other_role(fleet, prompts, reference):
    decode, cluster, remote, passed_on = fleet[DECODE], fleet.cluster, prompts(300), prompts(60)
    with fleet.changed():
        before = fleet[TO_PREFILL].metrics()
        with cluster.drained_by_command(PREFILL):
            cluster.wait_state(PREFILL, "drained")
            answer = decode.client.complete(remote, "remote", max_tokens=20)
        assert answer.prefill == "remote"
        fleet[TO_PREFILL].wait_growth(before, "prefill_tokens_total", len(remote))
        reference.check(remote, answer.tokens)

        before = fleet[TO_DECODE].metrics()
        with cluster.drained_by_command(DECODE):
            cluster.wait_state(DECODE, "drained")
            # clients come to the pods of decode workers, of which none decodes now
            for ingress in (DECODE, TO_PREFILL):
                answer = fleet[ingress].client.complete(passed_on, "auto", max_tokens=20)
                reference.check(passed_on, answer.tokens)
        fleet[TO_DECODE].wait_growth(before, "generation_tokens_total", 40)


def test_worker_that_starts_again_has_the_role_of_its_command(fleet):
    cluster, worker = fleet.cluster, fleet[TO_DECODE]
    with fleet.changed():
        worker.terminate()
        assert worker.wait_end() == 0
        start = worker.log.stat().st_size
        worker.restart(wait=False)
        cluster.wait_role(TO_DECODE, "decode")
        assert cluster.record(TO_DECODE)["pod_role"] == "prefill"
        roles = [
            key.split("/")[-3]
            for key in cluster.etcd.values("/pdcluster/test/roles/workers/")
            if key.endswith(TO_DECODE)
        ]
        assert roles == ["decode"]
        assert worker.log.read_bytes()[start:].count(b"state=ready") == 0


def test_command_that_is_withdrawn_before_the_work_ends_changes_nothing(fleet, prompts, reference):
    cluster, worker, prompt = fleet.cluster, fleet[TO_PREFILL], prompts(30)
    before = worker.metrics().value("role_changes_total", role="prefill")
    with worker.client.stream(prompt, "local", max_tokens=1500) as stream:
        stream.read_tokens(1)
        cluster.command_role(worker.name, "prefill")
        cluster.wait_state(worker.name, "draining")
        cluster.command_role(worker.name, None)
        cluster.wait_state(worker.name, "ready")
        assert not stream.done
        tokens = stream.read_all()

    assert (stream.done, len(tokens)) == (True, 1500)
    reference.check(prompt, tokens[:100])
    assert worker.metrics().value("role_changes_total", role="prefill") == before
    assert cluster.record(worker.name)["role"] == "decode"
