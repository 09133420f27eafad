"""Cost of open pages for a worker that has nothing else to do.

    bench/page_clients.py [--browsers 10] [--seconds 60] [--rounds 3] [--model FOLDER]

`pdctl up examples/chat.yaml`; by turns no one asks, and so many clients ask the decode worker for
`/debug/cluster` as the page does: every two seconds, each by a connection of its own, with the tag
of its last answer.  CPU of both of the worker's processes, from /proc.
"""

import argparse
import asyncio
import os
import statistics
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from cluster import Cluster, Setup, running_cluster
from setting import setting_lines

ROOT = Path(__file__).parents[1]
MODEL = Path.home() / ".cache/pdcluster/smollm2-135m-instruct"
PERIOD_SECONDS = 2.0  # of cluster.js
START_SECONDS = 60.0  # for the verification of transfers, which follows the start


async def browse(url: str, wait_seconds: float, answers: Counter[int]) -> None:
    """Poll until cancelled.  answers: by status"""
    await asyncio.sleep(wait_seconds)
    async with aiohttp.ClientSession() as session:
        tag = ""
        while True:
            headers = {"if-none-match": tag} if tag else {}
            async with session.get(url, headers=headers) as response:
                await response.read()
                answers[response.status] += 1
                tag = response.headers["etag"]
            await asyncio.sleep(PERIOD_SECONDS)


async def decode_percent(cluster: Cluster, seconds: float) -> float:
    """CPU of the decode worker, percent of a core."""
    found = await cluster.footprints(seconds)
    return next(each.cpu_percent for each in found if "decode" in each.worker)


async def measure_with(measured: Awaitable[float], others: Sequence[Awaitable[None]]) -> float:
    """The figure, taken while others run."""
    tasks = [asyncio.ensure_future(each) for each in others]
    try:
        return await measured
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run(options: argparse.Namespace) -> list[str]:
    """Lines of the report."""
    answers = Counter[int]()
    rest: list[float] = []
    open_pages: list[float] = []
    async with AsyncExitStack() as stack:
        setup = Setup(ROOT / "examples/chat.yaml", options.model, {})
        cluster = await stack.enter_async_context(running_cluster("chat", setup))
        url = cluster.started.base_url.rstrip("/").removesuffix("/v1") + "/debug/cluster"
        step = PERIOD_SECONDS / options.browsers
        await asyncio.sleep(START_SECONDS)
        for _ in range(options.rounds):
            rest.append(await decode_percent(cluster, options.seconds))
            pages = [browse(url, step * index, answers) for index in range(options.browsers)]
            open_pages.append(await measure_with(decode_percent(cluster, options.seconds), pages))
    more = statistics.median(b - a for a, b in zip(rest, open_pages, strict=True))
    return [
        f"- At rest: {figures(rest)} % of a core; with {options.browsers} pages: "
        f"{figures(open_pages)}; more, median of the rounds: {more:.2f}",
        f"- Answers by status: {dict(answers)}",
    ]


def figures(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--browsers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=MODEL)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    lines = asyncio.run(run(options))
    print("\n".join([*setting_lines("bench/page_clients.py", "", load), *lines]))


if __name__ == "__main__":
    main()
