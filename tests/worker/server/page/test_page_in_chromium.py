"""The page in a real Chromium over a real socket; only the backend is scripted."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.overview import (
    ConditionOverview,
    ConditionsOverview,
    KvTier,
)
from pdcluster_worker.server.http.api_keys import ApiKeys
from pdcluster_worker.server.http.run import HttpServer, serve
from tests.browser import Page, Route, expect, opened
from tests.worker.server.conftest import Rig

PHONE = {"viewport": {"width": 360, "height": 780}, "has_touch": True}
NO_PREFILL = "no prefill worker: prompts are prefilled locally"
REFUSED = "Failed to load resource"
THREE_CALLS = """async () => {
  const { call } = await import("/page/api.js");
  const paths = ["v1/models", "debug/cluster", "v1/models"];
  return (await Promise.all(paths.map((path) => call(path)))).map((response) => response.status);
}"""


ASK = """() => {
  document.getElementById("message").value = "Hi";
  document.getElementById("form").requestSubmit();
}"""
COUNT_CHANGES = """(selectors) => {
  window.changes = 0;
  const observer = new MutationObserver((found) => (window.changes += found.length));
  const options = { subtree: true, childList: true, characterData: true, attributes: true };
  for (const each of selectors) observer.observe(document.querySelector(each), options);
}"""


@pytest.fixture(autouse=True)
def _long(rig: Rig) -> None:
    rig.backend.max_model_len = 1000  # the page asks for 256 tokens


@pytest.fixture
async def page(url: str) -> AsyncIterator[Page]:
    async with opened(url) as page:
        yield page


async def ask(page: Page, text: str = "Hi") -> None:
    await page.get_by_label("Message").fill(text)
    await page.get_by_role("button", name="Send").click()


async def test_it_draws_workers_kv_on_its_way_and_the_last_hour(page: Page) -> None:
    await expect(page.locator("#health")).to_have_text("2 of 2 workers ready")
    await expect(page.locator("#prefill .worker strong")).to_have_text("prefill-0")
    await expect(page.locator("#decode .worker dl")).to_contain_text("KV25 %")
    await expect(page.locator("#wires .moving")).to_have_count(2)
    await expect(page.locator("#moving")).to_have_text(
        "KV of 1 request is on its way to decode workers"
    )
    await expect(page.locator("#figures")).to_contain_text("Prefilled remotely")
    await expect(page.locator("#replicas path")).to_have_count(2)
    await expect(page.locator("#prompts rect")).to_have_count(3)
    await expect(page.locator("#prompts-text")).to_contain_text("3 prefilled remotely · 3 locally")
    axes = page.locator("figure")
    await expect(axes.first).to_have_attribute("data-most", "1")
    await expect(axes.last).to_have_attribute("data-most", re.compile(r"^[1-6] in \d+ s$"))
    await expect(page).to_have_title("c · PDCluster")


async def test_a_worker_that_takes_no_requests_has_the_reason(rig: Rig, url: str) -> None:
    rig.backend.states = {"prefill": "lost"}
    async with opened(url) as page:
        card = page.locator("#prefill .worker")
        await expect(card.locator(".state")).to_have_text("lost")
        await expect(card).to_contain_text("It does not answer: the others take its work")
        await expect(page.locator("#health")).to_have_text(f"1 decode worker ready, {NO_PREFILL}")
        await expect(page.locator("#decode .worker p")).to_have_count(1)


async def test_a_role_whose_last_worker_is_gone_is_missed(rig: Rig, url: str) -> None:
    """Also once history has forgotten it, and until it is back."""
    health = "#health"
    async with opened(url) as page:
        await expect(page.locator(health)).to_have_text("2 of 2 workers ready")
        for rig.backend.history in ({"decode": [1, 1], "prefill": [1, 0]}, {"decode": [1, 1]}):
            rig.backend.gone = {"prefill"}
            async with page.expect_response("**/debug/cluster"):
                pass
            await expect(page.locator(health)).to_have_text(f"1 decode worker ready, {NO_PREFILL}")
            await expect(page.locator(health)).to_have_attribute("data-state", "starting")
            await expect(page.locator("#prefill")).to_have_text("none")
            await expect(page.locator("#wires path")).to_have_count(1)
            await expect(page.locator("#figures")).to_contain_text("Prefilled remotely")
        rig.backend.gone = {"decode"}
        await expect(page.locator(health)).to_have_text(
            "1 prefill worker ready, no decode worker: nothing answers"
        )
        await expect(page.locator("#decode")).to_have_text("none")
        rig.backend.gone = {"decode", "prefill"}
        await expect(page.locator(health)).to_have_text(
            f"{NO_PREFILL}, no decode worker: nothing answers"
        )
        zero = ConditionOverview("Ready", "True", "ScaledToZero", "at rest", ago(9), "fine")
        rig.backend.conditions = ConditionsOverview(ago(9), [zero])
        await expect(page.locator(health)).to_have_text("scaled to zero: a request starts workers")
        rig.backend.gone = set()
        await expect(page.locator(health)).to_have_text("2 of 2 workers ready")
        await expect(page.locator(health)).to_have_attribute("data-state", "ready")


async def test_a_role_that_ended_before_the_page_opened_is_missed(rig: Rig, url: str) -> None:
    rig.backend.gone, rig.backend.history = {"prefill"}, {"decode": [1, 1], "prefill": [1, 0]}
    async with opened(url) as page:
        await expect(page.locator("#health")).to_have_text(f"1 decode worker ready, {NO_PREFILL}")


async def test_mixed_workers_miss_no_prefill_worker(rig: Rig, url: str) -> None:
    rig.backend.gone, rig.backend.roles = {"prefill"}, {"decode": "mixed"}
    async with opened(url) as page:
        await expect(page.locator("#health")).to_have_text("1 of 1 workers ready")
        await expect(page.locator("#prefill")).to_be_hidden()
        await expect(page.locator("#moving")).to_contain_text("Mixed workers prefill")


async def test_what_did_not_change_is_left_to_the_screen_reader(rig: Rig, url: str) -> None:
    async with opened(url) as page:
        card = page.locator("#decode .worker")
        await expect(card.locator("dd").first).to_have_text("2")
        await page.evaluate(COUNT_CHANGES, ["#prefill", "#decode"])
        await page.wait_for_timeout(4500)  # two more answers, with other counters
        assert await page.evaluate("window.changes") == 0

        rig.backend.tiers = [KvTier("disk", 3, 10)]
        rig.backend.states = {"prefill": "lost"}
        await expect(card).to_contain_text("KV in disk30 %")
        await expect(page.locator("#prefill .state")).to_have_attribute("data-state", "lost")
        width = "document.querySelector('#decode .bar:last-child i').style.width"
        assert await page.evaluate(width) == "30%"


async def test_rates_are_of_growth_that_the_page_has_seen(rig: Rig, page: Page) -> None:
    """A worker whose totals come back after a lost connection has not moved them just now."""
    overview = asdict(rig.backend.overview())
    figures = overview["workers"][0]["figures"]
    overview["workers"][1]["figures"] = None

    async def answer(route: Route) -> None:
        await route.fulfill(json=overview)

    async def reported(total_blocks: int, kv_bytes: int, remote_prefills: int) -> None:
        counted = {"kv_bytes": kv_bytes, "remote_prefills": remote_prefills}
        figures.update(counted, total_blocks=total_blocks, num_transfers=0)
        async with page.expect_response("**/debug/cluster"):
            pass

    figures.update(num_transfers=0, kv_bytes=9000, remote_prefills=90)
    await page.route("**/debug/cluster", answer)
    await page.reload()
    rates = page.locator("#figures")
    await expect(rates).to_contain_text("Remote prefills0/min")
    for counted in ((0, 0, 0), (100, 9000, 90)):
        await reported(*counted)
        await expect(page.locator("#moving")).to_have_text(
            "No KV is on its way from prefill to decode"
        )
        await expect(rates).to_contain_text("Remote prefills0/min")
    await reported(100, 500, 5)  # it has started again
    await expect(page.locator("#moving")).to_have_text(
        "500 B of KV went to decode workers just now"
    )
    await expect(rates).not_to_contain_text("Remote prefills0/min")


async def test_tiers_of_kv_are_shown_of_a_worker_that_has_them(rig: Rig, url: str) -> None:
    rig.backend.tiers = [KvTier("host memory", 3, 10), KvTier("disk", 0, 0)]
    async with opened(url) as page:
        card = page.locator("#decode .worker")
        await expect(card).to_contain_text("KV in host memory30 %")
        await expect(card).to_contain_text("KV in disk0 %")
        await expect(card.locator(".bar")).to_have_count(3)
        await expect(page.locator("#prefill .bar")).to_have_count(1)


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_conditions_stand_first_the_worst_on_top_with_their_age(rig: Rig, url: str) -> None:
    items = [
        ConditionOverview("DecodeReady", "False", "CrashLooping", "fix <it>", ago(200), "problem"),
        ConditionOverview("Serving", "True", "Answering", "it answers", ago(7300), "fine"),
        ConditionOverview("Ready", "True", "AsDeclared", "all", "never", "fine"),
    ]
    rig.backend.conditions = ConditionsOverview(ago(65), items)
    async with opened(url) as page:
        region = page.get_by_role("region", name="Conditions")
        worst = region.locator("#not-fine li")
        await expect(worst).to_have_count(1)
        await expect(worst).to_contain_text("problem DecodeReady False CrashLooping for 3 min")
        await expect(worst).to_contain_text("fix <it>")
        await expect(region.locator("#written")).to_contain_text("wrote them 1 min ago")
        await expect(region.get_by_text("it answers")).to_be_hidden()
        await region.get_by_text("Others are fine: 2").click()
        await expect(region.locator("#fine li").first).to_contain_text("Answering for 2 h")
        await expect(region.locator("#fine li").last).to_contain_text("for an unknown time")

        rig.backend.conditions = ConditionsOverview(ago(0), items[1:])
        await expect(region.get_by_text("All are fine: 2")).to_be_visible()
        await expect(worst).to_have_count(0)
        await expect(region.get_by_text("it answers")).to_be_visible()  # it stays open


async def test_no_conditions_are_shown_without_an_operator(page: Page) -> None:
    await expect(page.locator("#decode .worker")).to_be_visible()
    await expect(page.locator("#object")).to_be_hidden()


async def test_it_shows_an_answer_as_it_comes_its_figures_and_where_it_ran(
    rig: Rig, page: Page
) -> None:
    rig.backend.hold_after = 4
    rig.backend.place = "remote"
    await page.get_by_role("combobox", name="Prefill").select_option("remote")
    await ask(page)
    answer = page.locator("#log .assistant")
    await expect(answer).to_have_text("Hell")
    await expect(answer).to_have_attribute("aria-busy", "true")
    await expect(page.get_by_role("button", name="Stop")).to_be_visible()
    rig.backend.gate.set()
    await expect(answer).to_contain_text("Hello, world!")
    await expect(answer).to_contain_text("tokens/s · 14 tokens · prefill remote")
    await expect(page.get_by_role("status").last).to_contain_text("Answer complete. first token")
    await expect(page.locator("#why")).to_contain_text("since Prefill is set to remote")
    await expect(page.locator("#timeline .track")).to_have_count(1)
    await expect(page.locator("#events tr").first).to_contain_text("issued")
    assert rig.backend.calls[-1][1] == "remote"
    assert rig.spec.sampling.temperature == 0

    await page.get_by_label("Temperature").fill("0.75")
    await page.get_by_label("Max tokens").fill("3")
    await ask(page, "And now?")
    await expect(answer.last).to_contain_text("3 tokens · cut at Max tokens · prefill remote")
    await expect(page.locator("#log article")).to_have_count(4)
    assert "Hello, world!" in rig.prompt()
    assert rig.spec.sampling.temperature == 0.75


async def test_a_late_timeline_is_not_drawn_over_that_of_the_next_question(
    rig: Rig, page: Page
) -> None:
    opened, answered = asyncio.Event(), asyncio.Event()

    async def late(route: Any) -> None:
        await opened.wait()
        await route.continue_()
        answered.set()

    await page.route("**/debug/requests/*", late, times=1)
    why, prefill = page.locator("#why"), page.get_by_role("combobox", name="Prefill")
    for place in ("remote", "local"):
        rig.backend.place = place
        await prefill.select_option(place)
        await ask(page, place)
        await expect(page.locator("#log .measured").last).to_contain_text(f"prefill {place}")
    await expect(why).to_contain_text("since Prefill is set to local")
    await prefill.select_option("remote")
    opened.set()
    await asyncio.wait_for(answered.wait(), 30)
    await page.wait_for_timeout(500)

    await expect(why).to_contain_text("since Prefill is set to local")


async def test_the_keyboard_alone_is_enough(rig: Rig, page: Page) -> None:
    await expect(page.locator("#decode .worker")).to_be_visible()
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to the question")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Message")).to_be_focused()
    await page.keyboard.type("Hi")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("there")
    await page.keyboard.press("Enter")
    await expect(page.locator("#log .assistant")).to_contain_text("Hello, world!")
    await expect(page.get_by_label("Message")).to_be_focused()
    assert "Hi\nthere" in rig.prompt()
    for role, name in (
        *(("combobox", "Prefill"), ("spinbutton", "Max tokens"), ("spinbutton", "Temperature")),
        *(("button", "Clear"), ("button", "Send")),
    ):
        await page.keyboard.press("Tab")
        await expect(page.get_by_role(role, name=name)).to_be_focused()


async def test_a_screen_reader_finds_regions_headings_and_labels(page: Page) -> None:
    await expect(page.locator("#decode .worker")).to_be_visible()
    tree = await page.locator("body").aria_snapshot()

    for each in (
        *("- banner", "- main", "- contentinfo", '- region "Workers"', '- region "Ask"'),
        *('- heading "c" [level=1]', '- heading "Workers" [level=2]', '- log "Conversation"'),
        *('- textbox "Message"', '- combobox "Prefill"', '- spinbutton "Max tokens"'),
        *('- img "KV of 1 request', '- img "Ready workers', '- img "Prompts', "- status:"),
    ):
        assert each in tree


async def test_an_error_within_an_answer_is_shown_with_what_came(rig: Rig, page: Page) -> None:
    rig.backend.error, rig.backend.error_after = RequestError("the worker is gone", status=503), 4
    await ask(page)
    await expect(page.locator("#log .assistant")).to_contain_text("Hell")
    await expect(page.locator("#log .error")).to_have_text(
        "The answer ended in an error: the worker is gone"
    )
    await expect(page.locator("#announcement")).to_have_text(
        "The answer ended in an error: the worker is gone"
    )
    await expect(page.get_by_label("Message")).to_have_value("")
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()


async def test_a_stopped_answer_keeps_what_came(rig: Rig, page: Page) -> None:
    rig.backend.hold_after = 4
    await ask(page)
    await expect(page.locator("#log .assistant")).to_have_text("Hell")
    await page.get_by_role("button", name="Stop").click()
    await expect(page.locator("#log .error")).to_have_text("Stopped")
    async with asyncio.timeout(10):
        await rig.backend.cancelled.wait()


async def test_a_refused_request_says_why(rig: Rig, url: str) -> None:
    async with opened(url, REFUSED) as page:
        await ask(page, "x" * 1200)
        await expect(page.locator("#log .error")).to_contain_text("maximum context length")
        await expect(page.get_by_label("Message")).to_have_value("x" * 1200)
        await ask(page, "Hi")
        await expect(page.locator("#log .assistant").last).to_contain_text("Hello, world!")


async def test_a_failed_question_comes_back_unless_another_one_is_being_typed(
    rig: Rig, url: str
) -> None:
    rig.backend.error, rig.backend.error_after = RequestError("no worker", status=503), 0
    async with opened(url, REFUSED) as page:
        message = page.get_by_label("Message")
        await ask(page, "first")
        await expect(page.locator("#log .error")).to_have_count(1)
        await expect(message).to_have_value("first")

        release = asyncio.Event()

        async def late(route: Route) -> None:
            await release.wait()
            await route.continue_()

        await page.route("**/v1/chat/completions*", late)
        await ask(page, "second")
        await message.fill("third")
        release.set()
        await expect(page.locator("#log .error")).to_have_count(2)
        await expect(message).to_have_value("third")


async def test_the_key_dialog_opens_until_the_key_is_right_and_the_tab_keeps_it(
    rig: Rig, tmp_path: Path
) -> None:
    (tmp_path / "alice").write_text("sk-alice")
    server = await serve(rig.make_app(tenant_of=ApiKeys(tmp_path).tenant_of), "127.0.0.1", 0)
    try:
        async with opened(f"http://127.0.0.1:{server.port}", REFUSED) as page:
            dialog = page.get_by_role("dialog", name="API key")
            await expect(dialog).to_contain_text("This server asks for a key")
            await expect(page.locator("#health")).to_have_text("needs an API key")
            await expect(page.locator(".wrong")).to_have_count(0)
            await page.get_by_label("Key", exact=True).fill("guess")
            await page.keyboard.press("Enter")
            await expect(dialog.locator(".wrong")).to_contain_text("Incorrect API key provided")
            await page.get_by_label("Key", exact=True).fill("sk-alice\N{HORIZONTAL ELLIPSIS}")
            await page.keyboard.press("Enter")  # no header can hold it, so fetch would never ask
            await expect(dialog).to_contain_text("This is no key")
            await page.get_by_label("Key", exact=True).fill("sk-alice")
            await page.keyboard.press("Enter")
            await expect(dialog).to_be_hidden()
            await ask(page)
            await expect(page.locator("#log .assistant")).to_contain_text("Hello, world!")
            await expect(page.locator("#events tr").first).to_contain_text("issued")
            await page.reload()
            await expect(page.locator("#decode .worker")).to_be_visible()
            assert "sk-alice" not in await page.content()
    finally:
        await server.close()


async def test_time_to_the_first_token_leaves_out_that_in_which_the_key_is_typed(
    rig: Rig, tmp_path: Path
) -> None:
    (tmp_path / "alice").write_text("sk-alice")
    server = await serve(rig.make_app(tenant_of=ApiKeys(tmp_path).tenant_of), "127.0.0.1", 0)
    try:
        async with opened(f"http://127.0.0.1:{server.port}", REFUSED) as page:
            await page.evaluate("sessionStorage.setItem('pdcluster-api-key', 'sk-alice')")
            await page.reload()
            await expect(page.locator("#decode .worker")).to_be_visible()
            await page.evaluate("sessionStorage.removeItem('pdcluster-api-key')")
            await page.evaluate(ASK)
            await expect(page.get_by_role("dialog", name="API key")).to_be_visible()
            await page.wait_for_timeout(11_000)
            await page.get_by_label("Key", exact=True).fill("sk-alice")
            await page.keyboard.press("Enter")
            measured = page.locator("#log .measured")
            await expect(measured).to_contain_text("first token after")
            assert re.search(r"first token after [\d.]+ ms", await measured.inner_text())
    finally:
        await server.close()


async def test_one_key_answers_all_calls_that_were_refused(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "alice").write_text("sk-alice")
    server = await serve(rig.make_app(tenant_of=ApiKeys(tmp_path).tenant_of), "127.0.0.1", 0)
    try:
        async with opened(f"http://127.0.0.1:{server.port}", REFUSED) as page:
            calls = asyncio.ensure_future(page.evaluate(THREE_CALLS))
            await asyncio.sleep(0.5)
            await page.get_by_label("Key", exact=True).fill("sk-alice")
            await page.keyboard.press("Enter")
            async with asyncio.timeout(10):
                assert await calls == [200, 200, 200]
    finally:
        await server.close()


async def test_reasoning_stands_apart_and_counts_as_an_answer(page: Page) -> None:
    bodies: list[str] = []

    async def answer(route: Route) -> None:
        bodies.append(route.request.post_data or "")
        deltas = [{"reasoning_content": "so"}]
        if len(bodies) > 1:
            deltas.append({"reasoning_content": " TAIL", "content": "Paris"})
        events = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
        body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        await route.fulfill(content_type="text/event-stream", body=body)

    await page.route("**/v1/chat/completions*", answer)
    await ask(page, "My name is Eve")
    await expect(page.locator("#log .assistant details")).to_have_text("Reasoningso")
    await ask(page, "What is my name?")
    last = page.locator("#log .assistant").last
    await expect(last.locator("details")).to_have_text("Reasoningso TAIL")
    await expect(last).to_contain_text("Paris")
    sent = [message["content"] for message in json.loads(bodies[1])["messages"]]
    assert sent == ["My name is Eve", "", "What is my name?"]


async def test_a_worker_that_cannot_be_reached_is_tried_again(
    rig: Rig, server: HttpServer, url: str
) -> None:
    async with opened(url, REFUSED) as page:
        await expect(page.locator("#decode .worker")).to_be_visible()
        await server.close()
        alert = page.get_by_role("alert")
        await expect(alert).to_have_text("The worker cannot be reached.")
        times = re.compile(r"What is below is of [\d:]{8}\. Next try at [\d:]{8}\.")
        await expect(page.locator("#retry")).to_have_text(times)
        first = await page.locator("#retry").inner_text()
        await page.evaluate(COUNT_CHANGES, ["#trouble"])
        await expect(page.locator("body")).to_have_attribute("data-stale", "yes")
        await ask(page)
        await expect(page.locator("#log .error")).to_have_text("The connection broke off")
        await expect(page.locator("#retry")).not_to_have_text(first)
        second = await page.locator("#retry").inner_text()
        assert second.partition(" Next")[0] == first.partition(" Next")[0]  # time of the figures
        assert await page.evaluate("window.changes") == 0  # a screen reader is not interrupted
        again = await serve(rig.app, "127.0.0.1", server.port)
        await expect(alert).to_be_hidden(timeout=20_000)
        await expect(page.locator("body")).not_to_have_attribute("data-stale", "yes")
        await again.close()


async def test_a_worker_that_loads_its_model_says_so(rig: Rig, url: str) -> None:
    rig.backend.not_ready = "this worker is not ready: the engine is loading the model"
    async with opened(url, REFUSED) as page:
        await expect(page.get_by_role("alert")).to_contain_text(
            "This worker is not ready: the engine is loading the model"
        )
        await expect(page.locator("#health")).to_have_text("not ready")
        await expect(page.get_by_role("region", name="Workers")).to_be_hidden()


async def test_a_phone_shows_all_of_it_without_scrolling_sideways(url: str) -> None:
    async with opened(url, **PHONE) as page:
        await ask(page, "x" * 60)
        await expect(page.locator("#events tr").first).to_be_attached()
        await page.get_by_text("All events").click()
        width = "document.documentElement.scrollWidth"
        assert await page.evaluate(width) == 360
        for region in ("Workers", "Ask", "Last 10 minutes"):
            box = await page.get_by_role("region", name=region).bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
async def test_colours_follow_the_system(url: str, scheme: str, *, is_dark: bool) -> None:
    async with opened(url, color_scheme=scheme) as page:
        colour = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        assert (max(await page.evaluate(colour)) < 60) == is_dark


async def test_without_javascript_it_says_how_to_ask(url: str) -> None:
    async with opened(url, java_script_enabled=False) as page:
        await expect(page.locator("noscript pre")).to_contain_text('"model": "tiny"')
        await expect(page.get_by_role("button", name="Send")).to_be_hidden()
        await expect(page.locator("#health")).to_be_hidden()
