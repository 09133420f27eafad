"""A real Chromium for tests of the page; tests skip where `make browser` has not brought it."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

try:
    from playwright.async_api import Page, Route, async_playwright, expect
except ImportError:
    pytest.skip("no playwright: make browser", allow_module_level=True)

CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu"]  # root in a container has neither

__all__ = ["Page", "Route", "expect", "opened"]

if CHROMIUM is None:
    pytest.skip("no chromium: make browser", allow_module_level=True)


@asynccontextmanager
async def opened(url: str, *expected: str, **context: Any) -> AsyncIterator[Page]:
    """A page of its own browser.  expected: parts of the errors that its console may show."""
    problems: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await (await browser.new_context(**context)).new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: said.type == "error" and problems.append(said.text))
        await page.goto(url)
        yield page
        await browser.close()
    unexpected = [each for each in problems if not any(part in each for part in expected)]
    assert not unexpected
