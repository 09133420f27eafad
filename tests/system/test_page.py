"""The page of real workers in a real Chromium: of a decode worker, and of a router that relays."""

import re
from collections.abc import Iterator

import pytest

from tests.browser import Page, expect, opened
from tests.system.cluster import Cluster, NewCluster

POLICY = {"relaying": {"enabled": True, "policy": "roundRobin"}}


@pytest.fixture(scope="module")
def cluster(open_cluster: NewCluster) -> Iterator[Cluster]:
    with open_cluster("page") as cluster:
        for role in ("prefill", "decode", "router"):
            worker = cluster.add_worker(role, f"page-{role}-0", start=False)
            worker.write_policy(POLICY)
            worker.start()
        cluster.wait_ready()
        router = cluster.workers["page-router-0"]
        router.wait_for(
            lambda: router.metrics().value("peers", role="decode", state="ready") == 1,
            "the router knows the decode worker",
        )
        yield cluster


async def ask(page: Page, place: str) -> None:
    await page.get_by_role("combobox", name="Prefill").select_option(place)
    await page.get_by_label("Max tokens").fill("8")
    await page.get_by_label("Message").fill("What is the capital of France?")
    await page.get_by_role("button", name="Send").click()


@pytest.mark.parametrize("role", ["decode", "router"])
async def test_it_shows_a_remote_prefill_over_both_workers(cluster: Cluster, role: str) -> None:
    port = cluster.workers[f"page-{role}-0"].settings["listen"]["http"]
    async with opened(f"http://127.0.0.1:{port}/") as page:
        await expect(page.locator("#health")).to_have_text("3 of 3 workers ready")
        await ask(page, "remote")
        await expect(page.locator("#log .measured")).to_contain_text("prefill remote")
        await expect(page.locator("#why")).to_contain_text(
            "Prefilled at prefill-0, decoded at decode-0, since Prefill is set to remote"
        )
        await expect(page.locator("#timeline .meta")).to_have_text(["prefill-0", "decode-0"])
        await expect(page.locator("#spans li")).to_contain_text(
            ["Queued", "Prefill", "KV", "Decode"]
        )
        await expect(page.locator("#moving")).to_contain_text("KV went to decode workers just now")

        await ask(page, "local")
        await expect(page.locator("#why")).to_contain_text("Prefilled and decoded at decode-0")
        share = re.compile(r"Prefilled remotely(50|[1-9]\d?) %")
        await expect(page.locator("#figures")).to_contain_text(share)
