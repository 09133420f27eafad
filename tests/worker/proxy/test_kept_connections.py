"""Connections to workers that are kept for the next requests: for how long, and how many."""

import asyncio
import resource
from collections.abc import Iterator

import pytest

from pdcluster_worker.proxy import reverse_proxy
from pdcluster_worker.server.http.limits import HttpLimits
from tests.worker.proxy.rig import FakeWorker, Rig, post


@pytest.fixture
def _few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256 + 3 * 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_few_files")
async def test_requests_leave_files_for_their_connections_to_workers(rig: Rig) -> None:
    rig.relay.take_policy()
    assert rig.relay.max_requests == 10


async def test_none_is_used_that_its_worker_may_be_closing(rig: Rig) -> None:
    rig.stand(rig.workers[0], takes=False)
    client = await rig.connect()
    await client.send(post())
    limits = rig.policy.http_limits.model_copy(update={"keep_alive_seconds": 1})
    rig.policy = rig.policy.model_copy(update={"http_limits": limits})
    rig.relay.take_policy()
    await client.send(post())
    assert rig.workers[1].num_connections == 1

    (pool,) = (pool for pool in rig.relay.pools if pool.pod == "b")
    pool.idle[0].idle_since -= 0.5  # half of what the worker keeps it for
    await client.send(post())
    assert rig.workers[1].num_connections == 2
    assert rig.value("relay_retries_total", reason="stale") == 0


async def test_they_take_no_more_files_than_requests_may(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = HttpLimits(max_connections=2)
    monkeypatch.setattr(reverse_proxy, "limits_of", lambda _: limits)
    rig.relay.take_policy()
    client = await rig.connect()
    await client.send(post())
    await client.send(post())
    other = FakeWorker("c")
    await other.start()
    rig.workers.append(other)
    rig.standing["c"] = rig.standing["a"].__class__("c", "c", f"127.0.0.1:{other.port}", True, 0)
    rig.relay.poll()
    rig.stand(rig.workers[0], takes=False)
    rig.stand(rig.workers[1], takes=False)

    assert (await client.send(post()))[1] == b"c"
    assert sum(len(pool.idle) for pool in rig.relay.pools) == 2
    await asyncio.wait_for(rig.workers[1].gone.wait(), 20)  # it was idle for longest
    assert not rig.workers[0].gone.is_set()


async def test_a_request_goes_to_its_worker_again_only_where_nothing_of_an_answer_came(
    rig: Rig,
) -> None:
    await rig.send()
    await rig.send()
    worker = rig.workers[1]
    worker.script = lambda writer: (writer.write(b"HTTP/1.1 2"), writer.close())

    assert (await rig.send())[1] == b"a"
    assert len(worker.requests) == 2
    assert rig.value("relay_retries_total", reason="lost") == 1
    assert rig.value("relay_retries_total", reason="stale") == 0
