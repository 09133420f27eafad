"""Cost of routing: latency that a router adds and requests a second on one core, ours beside
others.

    bench/routing_overhead.py [--only ours "ours, relaying" "Envoy with our picker" sglang-router
    smg vllm-router] [--rounds 3] [--seconds 4] [--log]

64 fake workers answer at once with eight tokens (`router_fakes`).  Each router in turn, in another
order each round, gets an open loop at `--rate` and a closed loop of `--concurrency`, both of whole
and of streamed chat answers.  The router has a core for itself; fakes and load share the others.
Added latency is against the same load at the HTTP fakes, asked directly in the same round; requests
a second on a core are requests over CPU seconds of the router's process, for Envoy with our picker
of both and of each.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import uvloop
from layout import cell, table
from router_fakes import MODEL, NUM_TOKENS, STREAM_SEED
from router_load import Connections, Measured, arrivals, closed_loop, open_loop
from router_systems import (
    FOLDER,
    OURS,
    PEERS,
    PICKERS,
    RELAYING,
    Router,
    certificate_folder,
    cores,
    fake_workers,
    installed,
    our_router,
    peer_router,
)
from setting import LOG_HELP, keep_report, setting_lines
from stats import ratios

from pdctl.bench.load import percentile

DIRECT = "direct"
OURS_BOTH = (OURS, RELAYING)
SYSTEMS = (*OURS_BOTH, *PICKERS, *PEERS)
PROMPT = "Write about the sea, the wind and one small boat that is late for dinner. " * 4
WARM_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Load:
    """One of the loads.  rate: requests a second of an open loop; concurrency: of a closed one,
    where there is no rate.
    """

    name: str
    stream: bool
    rate: float = 0.0
    concurrency: int = 0

    def request(self) -> bytes:
        """The bytes of every request."""
        body: dict[str, object] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": NUM_TOKENS,
        }
        if self.stream:
            body |= {"stream": True, "seed": STREAM_SEED}
        content = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: "
            f"application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


def loads(rate: float, stream_rate: float, concurrency: int) -> list[Load]:
    """In the order in which each router gets them."""
    return [
        Load("whole, open", stream=False, rate=rate),
        Load("whole, closed", stream=False, concurrency=concurrency),
        Load("streamed, open", stream=True, rate=stream_rate),
        Load("streamed, closed", stream=True, concurrency=concurrency),
    ]


@dataclass(slots=True)
class Figures:
    """Figures of one system under one load, a value each round; times in milliseconds.

    first: to the first bytes of the answer; last: to its end; per_core: requests over CPU seconds.
    """

    first_p50: list[float] = field(default_factory=list)
    first_p99: list[float] = field(default_factory=list)
    last_p50: list[float] = field(default_factory=list)
    last_p99: list[float] = field(default_factory=list)
    per_core: list[float] = field(default_factory=list)
    parts_per_core: dict[str, list[float]] = field(default_factory=dict)
    per_second: list[float] = field(default_factory=list)
    late_p99: list[float] = field(default_factory=list)

    def add(self, measured: Measured, cpu_seconds: Mapping[str, float]) -> None:
        """A round.  cpu_seconds: of each part."""
        firsts = [answer.first_seconds for answer in measured.answers]
        lasts = [answer.last_seconds for answer in measured.answers]
        self.first_p50.append(1e3 * percentile(firsts, 50))
        self.first_p99.append(1e3 * percentile(firsts, 99))
        self.last_p50.append(1e3 * percentile(lasts, 50))
        self.last_p99.append(1e3 * percentile(lasts, 99))
        self.per_second.append(len(lasts) / measured.seconds)
        if total := sum(cpu_seconds.values()):
            self.per_core.append(len(lasts) / total)
        for part, seconds in ((part, each) for part, each in cpu_seconds.items() if each):
            self.parts_per_core.setdefault(part, []).append(len(lasts) / seconds)
        if measured.late_seconds:
            self.late_p99.append(1e3 * percentile(measured.late_seconds, 99))


Results = dict[tuple[str, str], Figures]


async def main(options: argparse.Namespace) -> str:
    """Measure; the report."""
    names = [name for name in options.only if name in (*OURS_BOTH, *installed(options.folder))]
    missing = [name for name in options.only if name not in names]
    results: Results = {}
    wanted = loads(options.rate, options.stream_rate, options.concurrency)
    async with AsyncExitStack() as stack:
        logs = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="pdcluster-routers-", ignore_cleanup_errors=True)
            )
        )
        plain = await stack.enter_async_context(fake_workers("http", options.workers, logs))
        start = _Starting(stack, options, plain, logs)
        routers = [await start.router(name) for name in names]
        for number in range(options.rounds):
            turn = number % (len(routers) + 1)
            systems: list[Router | None] = [None, *routers]
            for system in systems[turn:] + systems[:turn]:
                await _measure(system, plain, wanted, options.seconds, results)
    return report(results, wanted, names, missing)


@dataclass(slots=True)
class _Starting:
    """Starts the routers, and the workers' other side before the first of ours.  plain: addresses
    of the fakes that speak HTTP.
    """

    stack: AsyncExitStack
    options: argparse.Namespace
    plain: Sequence[str]
    logs: Path
    workers: list[dict[str, str]] = field(default_factory=list)

    async def router(self, name: str) -> Router:
        """One that serves."""
        options, certificates = self.options, self.logs / "certificates"
        if name in PEERS:
            return await self.stack.enter_async_context(
                peer_router(name, options.folder, self.plain, self.logs)
            )
        if not self.workers:
            certificate_folder(certificates)
            found = await self.stack.enter_async_context(
                fake_workers("grpc", options.workers, certificates)
            )
            self.workers = [
                {**worker, "http": http} for worker, http in zip(found, self.plain, strict=True)
            ]
        return await self.stack.enter_async_context(
            our_router(name, self.workers, certificates, options.model_path, self.logs)
        )


async def _measure(
    router: Router | None,
    plain: Sequence[str],
    wanted: Sequence[Load],
    seconds: float,
    results: Results,
) -> None:
    """One system's turn.  router: None = the fake workers themselves."""
    name = DIRECT if router is None else router.name
    for load in wanted:
        connections = Connections(plain if router is None else [router.address])
        await connections.open(1 if router is None else load.concurrency or 16)
        await _run(connections, load, WARM_SECONDS)
        before = {} if router is None else router.cpu_seconds()
        measured = await _run(connections, load, seconds)
        after = {} if router is None else router.cpu_seconds()
        cpu = {part: after[part] - before[part] for part in after}
        await connections.close()
        figures = results.setdefault((name, load.name), Figures())
        figures.add(measured, cpu)
        core = f", {figures.per_core[-1]:.0f}/s a core" if cpu else ""
        print(
            f"{name}, {load.name}: p50 {figures.last_p50[-1]:.2f} ms, p99 "
            f"{figures.last_p99[-1]:.2f} ms{core}",
            flush=True,
        )


async def _run(connections: Connections, load: Load, seconds: float) -> Measured:
    if load.rate:
        return await open_loop(
            connections, load.request(), list(arrivals(load.rate, seconds, Random(1)))
        )
    return await closed_loop(connections, load.request(), load.concurrency, seconds)


def report(
    results: Results, wanted: Sequence[Load], names: Sequence[str], missing: Sequence[str]
) -> str:
    """Tables of added latency and of requests a second on a core, and what was not there."""
    lines = [f"Not installed here: {', '.join(missing)}."] if missing else []
    for load in wanted:
        lines += [
            "",
            f"**{load.name}**",
            "",
            _latencies(results, load, names) if load.rate else _rates(results, load, names),
        ]
    return "\n".join(lines)


def _latencies(results: Results, load: Load, names: Sequence[str]) -> str:
    direct = results[DIRECT, load.name]
    header = [
        f"at {load.rate:g}/s",
        "added p50, ms",
        "added p99, ms",
        "first byte: added p50, ms",
        "p99, ms",
        "requests/s a core",
    ]
    rows = [
        [
            DIRECT,
            *(
                cell(values)
                for values in (direct.last_p50, direct.last_p99, direct.first_p50, direct.first_p99)
            ),
            "-",
        ]
    ]
    for name in names:
        found = results[name, load.name]
        pairs = ((found.last_p50, direct.last_p50), (found.last_p99, direct.last_p99))
        firsts = ((found.first_p50, direct.first_p50), (found.first_p99, direct.first_p99))
        added = [
            cell([a - b for a, b in zip(ours, theirs, strict=True)])
            for ours, theirs in (*pairs, *firsts)
        ]
        rows.append([name, *added, cell(found.per_core)])
    return table(header, rows)


def _rates(results: Results, load: Load, names: Sequence[str]) -> str:
    ours = [name for name in OURS_BOTH if name in names]
    rows = []
    for name in names:
        found = results[name, load.name]
        of_theirs = [
            cell(ratios(results[mine, load.name].per_core, found.per_core))
            if name not in OURS_BOTH
            else "-"
            for mine in ours
        ]
        rows.append(
            [name, cell(found.per_core), *of_theirs, cell(found.per_second), cell(found.last_p50)]
        )
        if len(found.parts_per_core) > 1:
            empty = ["-"] * (len(ours) + 2)
            rows += [
                [f"{part} of it", cell(values), *empty]
                for part, values in found.parts_per_core.items()
            ]
    return table(
        [
            f"{load.concurrency} at a time",
            "requests/s a core",
            *(f"{mine} / theirs" for mine in ours),
            "requests/s",
            "p50, ms",
        ],
        rows,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument(
        "--rate", type=float, default=500.0, help="whole answers a second of the open loop"
    )
    parser.add_argument(
        "--stream-rate",
        type=float,
        default=100.0,
        help="streamed answers a second of the open loop",
    )
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="of the other routers' environments"
    )
    parser.add_argument(
        "--model-path", type=Path, default=Path.home() / ".cache/pdcluster/smollm2-135m-instruct"
    )
    parser.add_argument("--log", action="store_true", help=LOG_HELP)
    return parser


if __name__ == "__main__":
    arguments = _parser().parse_args()
    setting = setting_lines("bench/routing_overhead.py", "", os.getloadavg()[0])
    os.sched_setaffinity(0, cores().others)
    text = "\n".join([*setting, uvloop.run(main(arguments))])
    print(text)
    if arguments.log:
        keep_report(text)
