"""Parts of the loop: one that ends without a stop ends the whole, which the process
then reports.
"""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from pdcluster_api.manifests.render import RenderSettings
from pdcluster_operator.controller import Controller, ControllerSettings

SITE = RenderSettings("example/worker:1", "example/etcd:1", "default", "cluster.local")


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Controller:
    """One that has nothing to do, and so needs no API server."""
    settings = ControllerSettings(SITE, "operator-0")
    found = Controller(None, None, settings, CollectorRegistry())
    monkeypatch.setattr(found._watches, "run", asyncio.Event().wait)
    return found


async def test_it_works_until_it_is_stopped(loop: Controller):
    running = asyncio.create_task(loop.run())
    await asyncio.sleep(0)
    loop.stop()
    async with asyncio.timeout(10):
        await running


@pytest.mark.parametrize("part", ["_watches", "_resync", "_sessions", "_runner"])
async def test_an_error_of_a_part_ends_it(
    loop: Controller, part: str, monkeypatch: pytest.MonkeyPatch
):
    async def fail() -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr(getattr(loop, part), "run", fail)
    with pytest.raises(KeyError, match="unforeseen"):
        async with asyncio.timeout(10):
            await loop.run()


async def test_a_part_that_just_ends_ends_it_too(loop: Controller, monkeypatch: pytest.MonkeyPatch):
    async def end() -> None:
        return None

    monkeypatch.setattr(loop._sessions, "run", end)
    with pytest.raises(RuntimeError, match="ended without a stop: reads of etcd"):
        async with asyncio.timeout(10):
            await loop.run()
