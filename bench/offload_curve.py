"""Best place to compute prompts, and best batch window: real workers, one prefill and one decode,
on this machine.

    bench/offload_curve.py offload [--rates 1,2,4] [--seconds 15] [--policies rule,sloFeedback]
    bench/offload_curve.py queue [--rates 8,16] [--seconds 15]

`offload`: the same Poisson arrivals of prompts of mixed lengths with
`pdcluster.prefill` local, remote and auto, auto once with each policy.
`queue`: short prompts that all go to the prefill worker, with each mode of
`prefillQueue`.  Each cluster is started from nothing and has one thread per worker.
Prompts are random tokens: no prefix cache answers.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cluster import Cluster, Setup, running_cluster
from setting import setting_lines

from pdctl.bench.load import (
    Arrivals,
    BenchRequest,
    LoadResult,
    percentile,
    poisson_arrivals,
    run_load,
)
from pdctl.bench.openai import OpenAIServer

FILE = Path(__file__).parents[1] / "examples" / "chat.yaml"
MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct").expanduser()
ENGINE = {"threads": 1}
LENGTHS = (32, 64, 128, 256, 512, 1024)
"""Lengths of the prompts of `offload`, each as likely."""

SHORT = (48, 64)
"""Lengths of those of `queue`."""

Routing = Mapping[str, Any]

POLICIES: Mapping[str, Routing] = {
    "rule": {},
    "measured": {"offload": {"policy": "measured"}},
    "sloFeedback": {"offload": {"policy": "sloFeedback"}},
    "score": {"offload": {"policy": "score"}},
}

QUEUES: Mapping[str, Routing] = {
    "immediate": {},
    "latencyFirst": {"prefillQueue": {"mode": "latencyFirst"}},
    "throughputFirst": {"prefillQueue": {"mode": "throughputFirst"}},
}


@dataclass(frozen=True, slots=True)
class Placed(OpenAIServer):
    """A server whose prompts are computed where the mode says.  mode: of `pdcluster.prefill`"""

    mode: str = "auto"

    def body(self, ask: BenchRequest) -> dict[str, Any]:
        """The request's JSON."""
        return {**OpenAIServer.body(self, ask), "pdcluster": {"prefill": self.mode}}


def needs_ping(
    lengths: Sequence[int], count: int, num_output_tokens: int, seed: str, name: str
) -> list[BenchRequest]:
    """Prompts of these lengths, each as likely.

    The same lengths for the same seed; other tokens for another name, so that no prompt comes twice
    to one cluster.
    """
    sizes, source = random.Random(f"lengths {seed}"), random.Random(f"prompts {seed} {name}")
    return [
        BenchRequest(
            [source.randrange(256, 40_000) for _ in range(sizes.choice(lengths))], num_output_tokens
        )
        for _ in range(count)
    ]


def with_routing(routing: Routing) -> str:
    """The sample cluster with this `spec.routing` in place of its own."""
    document = yaml.safe_load(FILE.read_text())
    document["spec"]["routing"] = dict(routing)
    return yaml.safe_dump(document, sort_keys=False)


def row(name: str, rate: float, run: LoadResult, remote_ratio: float, step_requests: float) -> str:
    """One row of the table."""
    found = run.latencies_seconds
    ttft, tpot, whole = ([1000 * value for value in found[key]] for key in ("ttft", "tpot", "e2el"))
    cells = (
        *(f"{rate:g}", name, f"{statistics.mean(ttft):.0f}", f"{percentile(ttft, 90):.0f}"),
        *(f"{statistics.mean(tpot):.1f}" if tpot else "-", f"{statistics.mean(whole):.0f}"),
        *(f"{remote_ratio:.2f}", f"{step_requests:.2f}", str(len(run.failures))),
    )
    return f"| {' | '.join(cells)} |"


HEADER = (
    "| requests/s | | TTFT mean ms | p90 | TPOT mean ms | whole answer ms | remote | prompts a "
    "prefill step | failed |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


async def measure(
    cluster: Cluster, mode: str, load: Sequence[BenchRequest], rate: float, seed: str
) -> tuple[LoadResult, float, float]:
    """(run, share of remote prefills, prompts in a step of the prefill worker)."""
    before, server = await _prefills(cluster), cluster.server
    target = Placed(server.session, server.base_url, server.model, mode=mode)
    run = await run_load(target, load, Arrivals(poisson_arrivals(rate, len(load), seed)))
    num_remote, num_steps = (
        new - old for new, old in zip(await _prefills(cluster), before, strict=True)
    )
    return run, num_remote / len(load), num_remote / num_steps if num_steps else 0.0


async def _prefills(cluster: Cluster) -> tuple[float, float]:
    """(remote prefills, steps of the prefill worker) so far."""
    counters = await cluster.engine_counters()
    steps = sum(each.num_steps for name, each in counters.items() if "prefill" in name)
    return sum(each.num_remote_prefills for each in counters.values()), steps


def _modes(name: str, what: str, is_first: bool) -> Iterator[tuple[str, str]]:
    """(label, mode) of the runs on one cluster."""
    if what == "queue":
        yield name, "remote"
        return
    if is_first:
        yield from (("always local", "local"), ("always remote", "remote"))
    yield f"auto, {name}", "auto"


async def compare(options: argparse.Namespace) -> None:
    """Print the table, cluster by cluster."""
    what, lengths = options.what, LENGTHS if options.what == "offload" else SHORT
    variants = POLICIES if what == "offload" else QUEUES
    names = options.policies.split(",") if options.policies else list(variants)
    print(HEADER, flush=True)
    for index, name in enumerate(names):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / FILE.name
            file.write_text(with_routing(variants[name]))
            async with running_cluster(name, Setup(file, MODEL, ENGINE)) as cluster:
                for mode in ("local", "remote"):
                    await measure(
                        cluster, mode, needs_ping(lengths, 4, 4, "warm", mode), 10, "warm"
                    )
                for rate in (float(each) for each in options.rates.split(",")):
                    count = max(8, round(rate * options.seconds))
                    for label, mode in _modes(name, what, index == 0):
                        load = needs_ping(lengths, count, options.output, f"{rate}", label)
                        run, remote, batch = await measure(cluster, mode, load, rate, f"{rate}")
                        print(row(label, rate, run, remote, batch), flush=True)


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("offload", "queue"))
    parser.add_argument("--rates", default="1,2,4", help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals, for each row")
    parser.add_argument("--output", type=int, default=32, help="output tokens of a request")
    parser.add_argument("--policies", default="", help="names, comma between them; all by default")
    options = parser.parse_args()
    print(
        "\n".join(
            setting_lines("bench/offload_curve.py", "1P1D, 1 thread each, ", os.getloadavg()[0])
        )
    )
    asyncio.run(compare(options))


if __name__ == "__main__":
    main()
