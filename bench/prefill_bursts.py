"""Effect of the prefill delayer on one engine under bursts of prompts: share of full prefill
batches, TTFT, decode steps.

A real engine on a real model in this process, without a server: prompts come in
bursts, spread over a moment, with and without the delayer in turn on the same
arrivals.  `--output 1` is a prefill worker's load; more is a mixed worker's.

    bench/prefill_bursts.py [--model FOLDER] [--output N] [--ratio R] [--rounds N]
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.engine.prefill_delayer import OwnBoard, PrefillDelayer
from pdcluster_worker.messages.engine import Submit, Tokens
from pdcluster_worker.messages.engine_settings import DelayerSettings, EngineSettings
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loading.loader import load_model
from pdcluster_worker.model.runner import Runner
from pdcluster_worker.model.runner_loader import make_runner
from pdcluster_worker.system.cgroups import available_threads
from pdcluster_worker.system.native_dtype import read_native_dtype
from pdcluster_worker.testing.local_transport import LocalFabric, LocalTransport

MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct")
BLOCK_SIZE, BUDGET, MAX_SEQUENCES, NUM_BLOCKS = 16, 256, 64, 2048
FULL = 0.9
"""Share of the budget: a prefill batch of that many prompt tokens is full."""

_rounds = itertools.count()


@dataclass
class Seen:
    """Measurements of one run: seconds to first tokens and between tokens, prompt tokens of each
    step that had any, seconds in all.
    """

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def row(self, name: str) -> str:
        """One row of the table."""
        full = sum(tokens >= FULL * BUDGET for tokens in self.batches) / len(self.batches)
        ttft = f"{1e3 * statistics.median(self.first):.0f} / {1e3 * _p99(self.first):.0f}"
        gaps = (
            f"{1e3 * statistics.median(self.gaps):.0f} / {1e3 * _p99(self.gaps):.0f}"
            if self.gaps
            else "-"
        )
        mean = statistics.mean(self.batches)
        return (
            f"| {name} | {len(self.batches)} | {full:.2f} | {mean:.0f} | {ttft} | {gaps} | "
            f"{self.seconds:.1f} |"
        )


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def arrivals(options: argparse.Namespace, seed: int) -> list[tuple[float, RequestSpec]]:
    """(second, request) in order: bursts every `interval` seconds, each spread over `spread`."""
    draw, name = random.Random(seed), next(_rounds)
    due = sorted(
        burst * options.interval + draw.random() * options.spread
        for burst in range(options.bursts)
        for _ in range(options.burst)
    )
    sampling = SamplingParams(max_tokens=options.output, seed=0, temperature=0.0, ignore_eos=True)
    prompts = [[draw.randrange(1000, 40_000) for _ in range(options.prompt)] for _ in due]
    return [
        (when, RequestSpec(f"{name}-{n}", prompt, sampling))
        for n, (when, prompt) in enumerate(zip(due, prompts, strict=True))
    ]


def run(core: EngineCore, due: list[tuple[float, RequestSpec]]) -> Seen:
    """Serve all, as the engine process's loop does."""
    seen, start, left = Seen(), time.monotonic(), len(due)
    came: dict[str, float] = {}
    last: dict[str, float] = {}
    coming: Iterator[tuple[float, RequestSpec]] = iter(due)
    following = next(coming, None)
    prefilled = 0
    while left:
        now = time.monotonic() - start
        while following is not None and following[0] <= now:
            came[following[1].request_id] = following[0]
            core.handle(Submit(following[1]))
            following = next(coming, None)
        outputs = core.step()
        now = time.monotonic() - start
        for output in outputs:
            for token in output.tokens if isinstance(output, Tokens) else ():
                (seen.first if token.request_id not in last else seen.gaps).append(
                    now - last.get(token.request_id, came[token.request_id])
                )
                last[token.request_id] = now
                left -= token.finish_reason is not None
        # of every step: statistics come at most every 0.1 s
        total = core._reporter.counters.prefill_tokens
        if total > prefilled:
            seen.batches.append(total - prefilled)
            prefilled = total
        if not core.has_work and left:
            waits = [core.next_wake_seconds(), None if following is None else following[0] - now]
            time.sleep(max(0.0, min((wait for wait in waits if wait is not None), default=0.0)))
    seen.seconds = time.monotonic() - start
    return seen


def engine(
    runner: Runner, cache: KVCache, max_model_len: int, delayer: PrefillDelayer | None
) -> EngineCore:
    """A fresh engine on a loaded model."""
    settings = EngineSettings(
        BLOCK_SIZE, NUM_BLOCKS, BUDGET, MAX_SEQUENCES, max_model_len, prefix_caching=False
    )
    return EngineCore(
        settings,
        runner,
        LocalTransport(LocalFabric(), [cache], "bursts"),
        time.monotonic,
        delayer=delayer,
    )


def main(options: argparse.Namespace) -> None:
    """Print a table of both, all rounds together."""
    loaded = load_model(
        options.model.expanduser(),
        read_native_dtype(),
        block_size=BLOCK_SIZE,
        threads=available_threads(),
    )
    cache = KVCache(loaded.info.geometry, NUM_BLOCKS)
    runner = make_runner(
        loaded, cache, EngineConfig(max_batched_tokens=BUDGET, max_sequences=MAX_SEQUENCES)
    )
    settings = DelayerSettings(
        options.passes, options.milliseconds / 1e3, options.watermark, options.ratio
    )
    print(
        f"{options.bursts} bursts of {options.burst} prompts of {options.prompt} tokens, "
        f"{options.output} out; {settings}"
    )
    print(
        "| | prefill steps | full | prompt tokens a step | TTFT p50 / p99 ms | gap p50 / p99 ms | "
        "s |"
    )
    print("|---|---|---|---|---|---|---|")
    for number in range(options.rounds):
        for name in ("without", "with") if number % 2 == 0 else ("with", "without"):
            delayer = PrefillDelayer(settings, OwnBoard()) if name == "with" else None
            print(
                run(
                    engine(runner, cache, loaded.info.max_model_len, delayer),
                    arrivals(options, number),
                ).row(name),
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--bursts", type=int, default=6)
    parser.add_argument("--burst", type=int, default=12)
    parser.add_argument("--interval", type=float, default=2.0)
    parser.add_argument("--spread", type=float, default=0.6)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=1)
    parser.add_argument("--passes", type=int, default=30)
    parser.add_argument("--milliseconds", type=int, default=5000)
    parser.add_argument("--watermark", type=float)
    parser.add_argument("--ratio", type=float)
    parser.add_argument("--rounds", type=int, default=2)
    main(parser.parse_args())
