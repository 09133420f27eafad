import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Gauge

from pdcluster_operator.main import make_app, serve


@pytest.fixture
async def server():
    """The server's address, and the problems that it is given."""
    registry = CollectorRegistry()
    Gauge("answer", "Of a test.", registry=registry).set(42)
    unhealthy, unready = list[str](), list[str]()
    runner, port = await serve(make_app(lambda: unhealthy, lambda: unready, registry), 0)
    yield f"http://127.0.0.1:{port}", unhealthy, unready
    await runner.cleanup()


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.text()


async def test_probes_answer_200_until_something_is_wrong_and_then_say_what(server):
    url, unhealthy, unready = server
    assert [await get(f"{url}/{probe}") for probe in ("healthz", "readyz")] == [(200, "ok\n")] * 2
    unhealthy += ["the watch of Pod is silent", "no resync ended for 900 s"]
    assert await get(f"{url}/healthz") == (
        503,
        "the watch of Pod is silent\nno resync ended for 900 s\n",
    )
    assert (await get(f"{url}/readyz"))[0] == 200
    unready.append("the cache is being filled")
    assert await get(f"{url}/readyz") == (503, "the cache is being filled\n")


async def test_metrics_are_those_of_the_registry(server):
    url, _, _ = server
    status, text = await get(f"{url}/metrics")
    assert (status, "answer 42.0" in text) == (200, True)


async def test_a_port_that_is_taken_is_an_error(server):
    url, _, _ = server
    with pytest.raises(OSError, match="address already in use"):
        await serve(make_app(list, list, CollectorRegistry()), int(url.rpartition(":")[2]))
