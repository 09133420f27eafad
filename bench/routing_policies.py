"""Time to first token of a prefix-heavy trace under each routing policy, through real workers.

    bench/routing_policies.py [--policies roundRobin leastRequest prefixAware kvAware] [--requests
    128]

For each policy `examples/prefix-routing.yaml` is started with cold caches and gets the same
trace (`prefix_trace`), a few requests at a time, at one ingress.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

import yaml
from cluster import Setup, running_cluster
from prefix_trace import PrefixTrace

from pdctl.bench.load import Arrivals, LoadResult, run_load

ROOT = Path(__file__).parents[1]
FILE = ROOT / "examples" / "prefix-routing.yaml"
POLICIES = ("roundRobin", "leastRequest", "prefixAware", "kvAware", "capacityAware", "latencyAware")
BASE = "roundRobin"


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=[BASE, "leastRequest", "prefixAware", "kvAware"],
    )
    parser.add_argument("--requests", type=int, default=PrefixTrace().num_requests)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument(
        "--model-path", type=Path, default=Path.home() / ".cache/pdcluster/smollm2-135m-instruct"
    )
    options = parser.parse_args()
    trace = PrefixTrace(num_requests=options.requests)
    print(f"{trace.in_words()}; {options.concurrency} at a time")
    means: dict[str, float] = {}
    for policy in options.policies:
        run, cached = asyncio.run(_run(policy, trace, options.concurrency, options.model_path))
        means[policy] = _print(policy, run, cached, means.get(BASE))


async def _run(
    policy: str, trace: PrefixTrace, concurrency: int, model: Path
) -> tuple[LoadResult, float]:
    """The answers, and the share of prompt tokens that were found cached."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / FILE.name
        document = yaml.safe_load(FILE.read_text())
        document["spec"]["routing"]["decodeScore"]["policy"] = policy
        file.write_text(yaml.safe_dump(document))
        async with running_cluster(policy, Setup(file, model, {})) as cluster:
            run = await run_load(
                cluster, trace.needs_ping("0"), Arrivals(max_concurrency=concurrency)
            )
            return run, await cluster.cached_ratio()


def _print(policy: str, run: LoadResult, cached: float, base: float | None) -> float:
    failures = [answer.failure for answer in run.results if answer.failure is not None]
    if failures:
        raise SystemExit(
            f"{policy}: {len(failures)} of {len(run.results)} answers failed, the first: "
            f"{failures[0]}"
        )
    times = [answer.ttft_seconds for answer in run.results]
    mean = statistics.mean(times)
    against = "" if base is None else f", {mean / base:.2f} of {BASE}"
    tail = statistics.quantiles(times, n=20)[18]
    print(
        f"{policy}: TTFT mean {mean:.3f} s, median {statistics.median(times):.3f} s, p95 "
        f"{tail:.3f} s{against}; "
        f"{cached:.0%} of prompt tokens cached; {run.duration_seconds:.1f} s in all"
    )
    return mean


if __name__ == "__main__":
    main()
