"""Twice the load that one mixed worker can serve: who meets the latency objectives, by priority, with and without QoS.

A real worker on a real model.  Its capacity is measured first (a closed loop);
then requests of high and low priority come at a multiple of it, on the same
arrivals for each arm: without priorities, with priorities alone, and with early
rejection too.  A request attains its objectives when the client saw its first
token and its time per output token within them; a refused one did not.

    bench/overload.py [--times 2] [--seconds 20] [--high 0.3] [--ttft 500] [--tpot 60]
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from setting import setting_lines

from pdcluster_operator.bench.load import poisson_arrivals
from pdcluster_operator.bench.openai import COMPLETIONS, http_session
from pdcluster_operator.bench.started import started_cluster

MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct")
FILE = Path(__file__).parents[1] / "examples" / "mixed.yaml"
VOCABULARY = (1000, 40_000)
PATIENCE_SECONDS = 10.0
"""After the last arrival, for answers that are still open; they count as missed then."""


@dataclass(slots=True)
class Seen:
    """One request as its client saw it; seconds from its arrival.  status: 0 = given up; retry_after: of a refusal."""

    is_high: bool
    status: int = 0
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0
    retry_after: int = 0

    def attains(self, ttft: float, tpot: float) -> bool:
        """Whether it met both bounds, in seconds."""
        if self.first is None or self.num_tokens < 2:
            return False
        return self.first <= ttft and (self.last - self.first) / (self.num_tokens - 1) <= tpot


@dataclass(slots=True)
class Arm:
    """One way to be configured.  sends: whether requests carry their priority."""

    name: str
    qos: dict[str, Any]
    sends: bool
    seen: list[Seen] = field(default_factory=list)


def arms(options: argparse.Namespace) -> list[Arm]:
    """Those that are compared."""
    slo = {"ttftMilliseconds": options.ttft, "tpotMilliseconds": options.tpot}
    rejecting = {"slo": slo, "allowClientPriority": True, "earlyRejection": {"enabled": True}}
    return [
        Arm("no QoS", {"slo": slo}, sends=False),
        Arm("priorities alone", {"slo": slo, "allowClientPriority": True}, sends=True),
        Arm("early rejection of low", rejecting, sends=True),
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


async def capacity(place: Place, options: argparse.Namespace) -> float:
    """Requests a second in a closed loop."""
    draw, end, num_done = random.Random("capacity"), time.monotonic() + options.capacity_seconds, 0

    async def client() -> None:
        nonlocal num_done
        while time.monotonic() < end:
            await ask(place, body(place.model, options, draw), Seen(is_high=False))
            num_done += 1

    start = time.monotonic()
    await asyncio.gather(*(client() for _ in range(options.concurrency)))
    return num_done / (time.monotonic() - start)


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


def row(arm: Arm, is_high: bool, options: argparse.Namespace) -> str:
    """One line of the table."""
    mine = [seen for seen in arm.seen if seen.is_high == is_high]
    good = sum(seen.attains(options.ttft / 1e3, options.tpot / 1e3) for seen in mine)
    refused = [seen for seen in mine if seen.status == 429]
    firsts = sorted(seen.first for seen in mine if seen.first is not None)
    tpots = [(seen.last - seen.first) / (seen.num_tokens - 1) for seen in mine if seen.first is not None and seen.num_tokens > 1]
    p95 = f"{1e3 * firsts[int(0.95 * (len(firsts) - 1))]:.0f}" if firsts else "-"
    first = f"{1e3 * statistics.median(firsts):.0f} / {p95}" if firsts else "-"
    tpot = f"{1e3 * statistics.median(tpots):.0f}" if tpots else "-"
    retry = f"{statistics.median(seen.retry_after for seen in refused):.0f}" if refused else "-"
    name = "high" if is_high else "low"
    return f"| {arm.name} | {name} | {len(mine)} | {good / max(1, len(mine)):.1%} | {len(refused)} | {retry} | {first} | {tpot} |"


async def main(options: argparse.Namespace) -> None:
    """Print a report."""
    load_average = os.getloadavg()[0]
    rate = 0.0
    table = ["| arm | priority | requests | attained | refused 429 | Retry-After p50, s | TTFT p50 / p95, ms | TPOT p50, ms |"]
    table.append("|---|---|---|---|---|---|---|---|")
    for arm in arms(options):
        document = yaml.safe_load(FILE.read_text())
        document["spec"]["qos"] = arm.qos
        with tempfile.TemporaryDirectory(prefix="pdcluster-overload-") as folder:
            file = Path(folder) / FILE.name
            file.write_text(yaml.safe_dump(document))
            async with started_cluster(file, options.model.expanduser()) as started, http_session() as session:
                place = Place(session, started.base_url, started.model)
                if not rate:
                    rate = await capacity(place, options)
                else:
                    await ask(place, body(place.model, options, random.Random(0)), Seen(is_high=False))
                await offer(place, arm, options.times * rate, options)
        table += [row(arm, is_high, options) for is_high in (True, False)]
        print(json.dumps({"arm": arm.name, "capacity": rate, "requests": len(arm.seen)}), flush=True)
    print("\n".join([*setting_lines("bench/overload.py", "", load_average), *described(rate, options), "", *table]))


def described(rate: float, options: argparse.Namespace) -> list[str]:
    """What was offered."""
    shape = f"{options.prompt} in / {options.output} out"
    load = f"{options.times:g}x of that, Poisson, for {options.seconds:g} s; {options.high:.0%} of high priority"
    return [
        f"- Capacity, closed loop of {options.concurrency}: {rate:.2f} requests/s of {shape}; offered {load}",
        f"- Objectives: TTFT {options.ttft:g} ms, TPOT {options.tpot:g} ms, as clients see them",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--times", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--high", type=float, default=0.3)
    parser.add_argument("--ttft", type=float, default=500.0)
    parser.add_argument("--tpot", type=float, default=60.0)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--capacity-seconds", type=float, default=8.0)
    asyncio.run(main(parser.parse_args()))
