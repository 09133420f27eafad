"""Choices of one prompt on one decode worker and on three, in the same cluster by turns.

    bench/branches.py [--rounds 5] [--choices 8] [--prompt 2000] [--tokens 200] [--seed 0] [--log]

A prefill and three decode workers of the sample model (one thread each, etcd and TLS as in the
system tests) get one request at a time, each with a prompt of its own: `together` with
routing.branches Local, `spread` with Spread.  Wall times on a machine with fewer cores than workers
say little of machines of their own: the steps, the CPU seconds of a worker and the bytes say more.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from setting import LOG_HELP, keep_report, setting_lines
from stats import Spread, ratios, spread

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.system.certificates import make_certificates
from tests.system.client import Json
from tests.system.cluster import Cluster
from tests.system.etcd_server import EtcdServer
from tests.system.worker_process import Metrics, WorkerProcess

VOCABULARY = range(100, 40_000)
POLICIES: dict[str, Json] = {
    "together": {"branches": "Local"},
    "spread": {"branches": "Spread"},
}
LEASE_SECONDS = 10  # a worker's own; with the tests' 3 a busy machine loses workers that live
REPORT_SECONDS = 1.5  # until engines and peers have reported that they are idle

FIGURES = {
    "seconds": "from the request to the end of the last choice",
    "TTFT s": "to the first token of the first choice",
    "TPOT ms": "mean over choices, of those that begin later from their own first token",
    "CPU s": "of all processes of all workers",
    "CPU ms a token": "the same over the tokens of the answer",
    "busiest CPU s": "of the decode worker with most: what an answer waits for on machines of "
    "their own",
    "busiest steps s": "seconds in decode steps of the decode worker with most",
    "KV MB": "received by decode workers",
    "prefilled": "prompt tokens computed by all engines",
    "most tokens": "made by the decode worker with most",
}


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of a request, and how many there are."""

    rounds: int
    choices: int
    prompt: int
    tokens: int
    seed: str


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("rounds", 5), ("choices", 8), ("prompt", 2000), ("tokens", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--log", action="store_true", help=LOG_HELP)
    parser.add_argument(
        "--model-path", type=Path, default=Path.home() / ".cache/pdcluster/smollm2-135m-instruct"
    )
    args = parser.parse_args()
    options = Options(args.rounds, args.choices, args.prompt, args.tokens, args.seed)
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        _cluster(Path(folder), args.model_path, args.dtype) as cluster,
    ):
        runs = _measure(cluster, options)
    report = "\n".join([*_table(runs), "", *setting_lines("bench/branches.py", "", load)])
    print(report)
    if args.log:
        keep_report(report)


@contextmanager
def _cluster(folder: Path, model: Path, dtype: str) -> Iterator[Cluster]:
    with closing(EtcdServer(folder)) as etcd:
        etcd.start()
        with Cluster("branches", folder, etcd, make_certificates(folder / "tls"), model) as cluster:
            for role, number in (("prefill", 1), ("decode", 3)):
                for index in range(number):
                    worker = cluster.add_worker(
                        *(role, f"{role}-{index}"),
                        start=False,
                        maxBatchedTokens=256,
                        numBlocks=1024,
                    )
                    worker.settings["discovery"]["leaseSeconds"] = LEASE_SECONDS
                    worker.settings["model"]["dtype"] = dtype
                    worker.start()
                    worker.wait_ready()
            cluster.wait_connected()
            ingress = cluster.workers["decode-0"]
            ingress.wait_for(lambda: ingress.num_decode_peers() == 2, "it knows two decode peers")
            yield cluster


def _measure(cluster: Cluster, options: Options) -> dict[str, list[dict[str, float]]]:
    draw = random.Random(f"branches {options.seed}")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in POLICIES}
    in_force = "together"
    for number in range(-1, options.rounds):  # the first warms up
        order = list(POLICIES) if number % 2 else list(POLICIES)[::-1]
        for name in order:
            if name != in_force:  # a file that says the same is no reload
                cluster.workers["decode-0"].take_policy(POLICIES[name])
                in_force = name
            prompt = [draw.choice(VOCABULARY) for _ in range(options.prompt)]
            found = _one(cluster, prompt, options)
            if number >= 0:
                runs[name].append(found)
                print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)
    return runs


@dataclass(frozen=True, slots=True)
class _Counters:
    cpu_seconds: dict[str, float]
    metrics: dict[str, Metrics]

    @classmethod
    def of(cls, cluster: Cluster) -> "_Counters":
        time.sleep(REPORT_SECONDS)
        workers = cluster.workers
        return cls(
            {name: _cpu_seconds(worker) for name, worker in workers.items()},
            {name: worker.metrics() for name, worker in workers.items()},
        )


def _cpu_seconds(worker: WorkerProcess) -> float:
    server = psutil.Process(worker.process.pid)
    processes = [server, *server.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _one(cluster: Cluster, prompt: list[int], options: Options) -> dict[str, float]:
    before = _Counters.of(cluster)
    begun = time.monotonic()
    firsts: dict[int, float] = {}
    lasts: dict[int, float] = {}
    counts: Counter[int] = Counter()
    fields: Json = {
        "n": options.choices,
        "max_tokens": options.tokens,
        "temperature": 0.7,
        "seed": 1,
    }
    client = cluster.workers["decode-0"].client
    with client.stream(prompt, **fields, return_token_ids=True) as stream:
        for choice in _choices(stream.lines):
            now, index = time.monotonic(), choice["index"]
            firsts.setdefault(index, now)
            lasts[index] = now
            counts[index] += len(choice.get("token_ids") or ())
    after = _Counters.of(cluster)
    num_tokens = options.choices * options.tokens
    if sum(counts.values()) != num_tokens:
        raise SystemExit(f"{counts} tokens came, not {options.tokens} of each choice")

    def grew(name: str, sample: str, **labels: str) -> float:
        return after.metrics[name].value(sample, **labels) - before.metrics[name].value(
            sample, **labels
        )

    decodes = [name for name in cluster.workers if name.startswith("decode")]
    cpu = {name: after.cpu_seconds[name] - before.cpu_seconds[name] for name in cluster.workers}
    tpot = [(lasts[each] - firsts[each]) / (options.tokens - 1) for each in firsts]
    return {
        "seconds": max(lasts.values()) - begun,
        "TTFT s": firsts[0] - begun,
        "TPOT ms": 1e3 * sum(tpot) / len(tpot),
        "CPU s": sum(cpu.values()),
        "CPU ms a token": 1e3 * sum(cpu.values()) / num_tokens,
        "busiest CPU s": max(cpu[name] for name in decodes),
        "busiest steps s": max(
            grew(name, "engine_step_seconds_sum", kind="decode") for name in decodes
        ),
        "KV MB": sum(
            grew(name, "kv_transfer_bytes_total", direction="received") for name in decodes
        )
        / 1e6,
        "prefilled": sum(
            grew(name, "engine_step_tokens_sum", kind="prefill") for name in cluster.workers
        ),
        "most tokens": max(grew(name, "generation_tokens_total") for name in decodes),
    }


def _choices(lines: Iterator[str]) -> Iterator[Json]:
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"the answer broke off: {event}")
            yield from event["choices"]


def _table(runs: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    yield "| figure | together | spread | spread / together |"
    yield "| --- | --- | --- | --- |"
    for name, meaning in FIGURES.items():
        ours, theirs = ([run[name] for run in runs[each]] for each in ("spread", "together"))
        cells = [_cell(spread(values)) for values in (theirs, ours, ratios(ours, theirs))]
        yield f"| {name}: {meaning} | {' | '.join(cells)} |"


def _cell(values: Spread) -> str:
    return f"{values.median:.3g} [{values.low:.3g} - {values.high:.3g}]"


if __name__ == "__main__":
    main()
