"""Twice the load that one mixed worker can serve: the share of requests within their objectives, by
priority, with and without QoS.

A real worker on a real model.  Its capacity is measured first, by a closed loop
that fills its seats; the objectives are a multiple of the median TTFT and TPOT
that those clients saw, so they fit the machine as it is in this run.  Then
requests of high and low priority come at a multiple of the capacity, on the same
arrivals for each arm: without priorities, with priorities alone, with early
rejection too, and with preemption on top.  A request attains its objectives when its client saw
both within them; a refused one did not.

    bench/overload.py [--times 2] [--seconds 12] [--high 0.3] [--slack 2] [--seats 16]
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from setting import setting_lines

from pdctl.bench.load import poisson_arrivals
from pdctl.bench.measure import started_cluster
from pdctl.bench.openai import COMPLETIONS, http_session

MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct")
FILE = Path(__file__).parents[1] / "examples" / "mixed.yaml"
VOCABULARY = (1000, 40_000)
PATIENCE_SECONDS = 6.0
"""Time after the last arrival for answers that are still open; they count as missed then."""


@dataclass(slots=True)
class Seen:
    """One request as its client saw it; seconds from its arrival.  status: 0 = given up;
    retry_after: of a refusal.
    """

    is_high: bool
    status: int = 0
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0
    retry_after: int = 0

    def attains(self, ttft: float, tpot: float) -> bool:
        """Return whether it met both bounds, in seconds."""
        if self.first is None or self.num_tokens < 2:
            return False
        return self.first <= ttft and (self.last - self.first) / (self.num_tokens - 1) <= tpot


@dataclass(slots=True)
class Arm:
    """One way to be configured.  sends: whether requests carry their priority; engine: fields of
    it.
    """

    name: str
    qos: dict[str, Any]
    sends: bool
    engine: dict[str, Any] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests a second, and the objectives that follow from it, in milliseconds."""

    rate: float
    ttft: float
    tpot: float


def arms(capacity: Capacity) -> list[Arm]:
    """Those that are compared."""
    slo = {"ttftMilliseconds": capacity.ttft, "tpotMilliseconds": capacity.tpot}
    rejecting = {"slo": slo, "allowClientPriority": True, "earlyRejection": {"enabled": True}}
    return [
        Arm("no QoS", {"slo": slo}, sends=False),
        Arm("priorities alone", {"slo": slo, "allowClientPriority": True}, sends=True),
        Arm("early rejection of low", rejecting, sends=True),
        Arm("and preemptive", rejecting, sends=True, engine={"schedulingPolicy": "preemptive"}),
    ]


@dataclass(frozen=True, slots=True)
class Place:
    """A worker that serves."""

    session: aiohttp.ClientSession
    url: str
    model: str


async def ask(place: Place, body: dict[str, Any], seen: Seen) -> None:
    """Send one request and watch its answer."""
    start = time.monotonic()
    async with place.session.post(place.url + COMPLETIONS, json=body) as response:
        seen.status, seen.retry_after = response.status, int(response.headers.get("retry-after", 0))
        if response.status != 200:
            await response.read()
            return
        async for line in response.content:
            if line.startswith(b"data: {"):
                seen.last = time.monotonic() - start
                seen.first = seen.first or seen.last
                seen.num_tokens += 1


def body(model: str, options: argparse.Namespace, draw: random.Random) -> dict[str, Any]:
    """A request of random tokens, so that no prefix is cached; every token gives an event."""
    prompt = [draw.randrange(*VOCABULARY) for _ in range(options.prompt)]
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": options.output,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
        "logprobs": 0,
    }


async def measure(place: Place, options: argparse.Namespace) -> Capacity:
    """A closed loop of as many clients as the worker has seats."""
    draw, end, done = (
        random.Random("capacity"),
        time.monotonic() + options.capacity_seconds,
        list[Seen](),
    )

    async def client() -> None:
        while time.monotonic() < end:
            seen = Seen(is_high=False)
            await ask(place, body(place.model, options, draw), seen)
            done.append(seen)

    start = time.monotonic()
    await asyncio.gather(*(client() for _ in range(options.seats)))
    rate = len(done) / (time.monotonic() - start)
    ttft = statistics.median(seen.first for seen in done if seen.first is not None)
    tpot = statistics.median(
        (seen.last - seen.first) / (seen.num_tokens - 1) for seen in done if seen.first is not None
    )
    return Capacity(rate, round(1e3 * options.slack * ttft), round(1e3 * options.slack * tpot))


async def offer(place: Place, arm: Arm, rate: float, options: argparse.Namespace) -> None:
    """Requests at that rate, high ones a share of them."""
    draw, count = random.Random("overload"), int(rate * options.seconds)
    start, tasks = time.monotonic(), []
    for due in poisson_arrivals(rate, count, "overload"):
        seen = Seen(is_high=draw.random() < options.high)
        request = body(place.model, options, draw)
        if arm.sends:
            request["priority"] = "high" if seen.is_high else "low"
        arm.seen.append(seen)
        await asyncio.sleep(max(0.0, start + due - time.monotonic()))
        tasks.append(asyncio.create_task(ask(place, request, seen)))
    await asyncio.wait(tasks, timeout=PATIENCE_SECONDS)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def row(arm: Arm, is_high: bool, capacity: Capacity) -> str:
    """One line of the table."""
    mine = [seen for seen in arm.seen if seen.is_high == is_high]
    good = sum(seen.attains(capacity.ttft / 1e3, capacity.tpot / 1e3) for seen in mine)
    refused = [seen for seen in mine if seen.status == 429]
    firsts = sorted(seen.first for seen in mine if seen.first is not None)
    tpots = [
        (seen.last - seen.first) / (seen.num_tokens - 1)
        for seen in mine
        if seen.first is not None and seen.num_tokens > 1
    ]
    p95 = f"{1e3 * firsts[int(0.95 * (len(firsts) - 1))]:.0f}" if firsts else "-"
    first = f"{1e3 * statistics.median(firsts):.0f} / {p95}" if firsts else "-"
    tpot = f"{1e3 * statistics.median(tpots):.0f}" if tpots else "-"
    retry = f"{statistics.median(seen.retry_after for seen in refused):.0f}" if refused else "-"
    name = "high" if is_high else "low"
    return (
        f"| {arm.name} | {name} | {len(mine)} | {good / max(1, len(mine)):.1%} | {len(refused)} | "
        f"{retry} | {first} | {tpot} |"
    )


@asynccontextmanager
async def worker(
    qos: dict[str, Any], engine: dict[str, Any], options: argparse.Namespace
) -> AsyncIterator[Place]:
    """One mixed worker with that policy, warm."""
    document = yaml.safe_load(FILE.read_text())
    document["spec"]["qos"] = qos
    with tempfile.TemporaryDirectory(prefix="pdcluster-overload-") as folder:
        file = Path(folder) / FILE.name
        file.write_text(yaml.safe_dump(document))
        sizes = {"maxSequences": options.seats, **engine}
        async with (
            started_cluster(file, options.model.expanduser(), sizes) as started,
            http_session() as session,
        ):
            place = Place(session, started.base_url, started.model)
            await ask(place, body(place.model, options, random.Random(0)), Seen(is_high=False))
            yield place


async def main(options: argparse.Namespace) -> None:
    """Print a report."""
    load_average = os.getloadavg()[0]
    table = [
        "| arm | priority | requests | attained | refused 429 | Retry-After p50, s | TTFT p50 / "
        "p95, ms | TPOT p50, ms |"
    ]
    table.append("|---|---|---|---|---|---|---|---|")
    async with worker({}, {}, options) as place:
        capacity = await measure(place, options)
    for arm in arms(capacity):
        async with worker(arm.qos, arm.engine, options) as place:
            await offer(place, arm, options.times * capacity.rate, options)
        table += [row(arm, is_high, capacity) for is_high in (True, False)]
    print(
        "\n".join(
            [
                *setting_lines("bench/overload.py", "", load_average),
                *described(capacity, options),
                "",
                *table,
            ]
        )
    )


def described(capacity: Capacity, options: argparse.Namespace) -> list[str]:
    """Describe the load that was offered."""
    shape = f"{options.prompt} in / {options.output} out"
    load = (
        f"{options.times:g}x of that, Poisson, for {options.seconds:g} s; {options.high:.0%} of "
        "high priority"
    )
    return [
        f"- Capacity, closed loop on {options.seats} seats: {capacity.rate:.2f} requests/s of "
        f"{shape}; offered {load}",
        f"- Objectives, {options.slack:g}x the medians of that loop: TTFT {capacity.ttft:g} ms, "
        f"TPOT {capacity.tpot:g} ms",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--times", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--high", type=float, default=0.3)
    parser.add_argument("--slack", type=float, default=2.0)
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--capacity-seconds", type=float, default=8.0)
    asyncio.run(main(parser.parse_args()))
