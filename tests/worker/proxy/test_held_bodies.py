"""Bodies that a relaying router keeps: each once, and until its answer begins."""

import asyncio
import tracemalloc
from collections.abc import Iterator

import pytest

from pdcluster_worker.proxy import reverse_proxy
from pdcluster_worker.server.http.limits import HttpLimits
from tests.worker.proxy.rig import Rig, post

BODY = b'{"a": "' + b"x" * 900_000 + b'"}'
BEGUN = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start(8)
    yield
    tracemalloc.stop()


def held_bytes() -> int:
    """Bytes that the room of relaying has allocated and keeps."""
    ours = tracemalloc.Filter(True, "*/pdcluster_worker/proxy/*", all_frames=True)
    snapshot = tracemalloc.take_snapshot().filter_traces([ours])
    return sum(trace.size for trace in snapshot.traces)


async def waiting(rig: Rig) -> None:
    """Send a large request that no worker answers yet."""
    for worker in rig.workers:
        worker.script = lambda writer: None
    await rig.ask(post(BODY))
    await rig.until(lambda: bool(rig.workers[1].requests))


@pytest.mark.usefixtures("_traced")
async def test_a_body_is_kept_once_while_its_answer_is_awaited(rig: Rig) -> None:
    await waiting(rig)
    assert len(BODY) <= held_bytes() < 1.3 * len(BODY)


@pytest.mark.usefixtures("_traced")
async def test_a_body_is_not_kept_once_its_answer_has_begun(rig: Rig) -> None:
    await waiting(rig)
    rig.workers[1].writer.write(BEGUN)
    await rig.clients[0].reader.readexactly(len(BEGUN))
    assert held_bytes() < 0.3 * len(BODY)


async def test_bodies_count_until_their_answers_begin_and_requests_until_they_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = HttpLimits(max_bodies_bytes=10, max_connections=2)
    monkeypatch.setattr(reverse_proxy, "limits_of", lambda _: limits)
    rig.relay.take_policy()
    for worker in rig.workers:
        worker.script = lambda writer: writer.write(BEGUN)
    running = [await rig.connect() for _ in range(2)]
    for client in running:
        client.writer.write(post(b"12345678"))
        await client.reader.readexactly(len(BEGUN))

    await rig.send()
    assert rig.value("unrelayed_requests_total", reason="crowd") == 1
    for worker in rig.workers:
        worker.writer.write(b" done")
    await asyncio.gather(*(client.reader.readexactly(5) for client in running))
    for worker in rig.workers:
        worker.script = worker.say_name
    assert (await running[0].send(post()))[1] in (b"a", b"b")
