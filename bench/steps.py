"""Milliseconds of single steps of the engine: the model's runner alone, without scheduler, server
and client.

    bench/steps.py [--threads N] [--dtype DTYPE] [--kv DTYPE] [--times N] [--spin N]
    [--cases CASE,...] [--budget TOKENS] [--cpu-time]

Cases: decodeB (B requests of 283 tokens), longB (of 1037), deepB (of 2048), prefillN (a new prompt
of N tokens), chunkN (the last N tokens of a prompt of 1024), mixed (15 decodes beside a chunk of
241).  Run it on a machine that does nothing else.
"""

import argparse
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdcluster_worker.engine.request import Batch, Scheduled
    from pdcluster_worker.model.ops.stored_kv import StoredKV
    from pdcluster_worker.model.runner import Runner

MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct")
CASES = "decode1,decode4,decode16,decode64,long8,prefill256,prefill1024,chunk256,mixed"
BLOCK_SIZE = 16
WARM_UP = 3


class Blocks:
    """Block ids in scattered order, so that nothing is fast by blocks being neighbours."""

    def __init__(self, num_blocks: int) -> None:
        self._free = random.Random(7).sample(range(num_blocks), num_blocks)

    def take(self, num_tokens: int) -> list[int]:
        """Blocks for that many tokens."""
        return [self._free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]


def main() -> int:
    """Print a line for each case."""
    options = parse()
    # read when torch is imported, which is why imports come later
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["GOMP_SPINCOUNT"] = str(options.spin)
    from pdcluster_worker.config.engine import EngineConfig
    from pdcluster_worker.config.worker import ModelConfig
    from pdcluster_worker.model.kv_size import stored_kv
    from pdcluster_worker.model.runner_loader import open_runner

    engine = EngineConfig(
        max_batched_tokens=options.budget,
        kv_cache_memory=4 << 30,
        kv_cache_dtype=options.kv,
        threads=options.threads,
    )
    runner, cache, info = open_runner(
        ModelConfig(name="m", path=str(MODEL), dtype=options.dtype), engine
    )
    print(
        f"dtype {info.dtype}, KV {info.geometry.dtype}, {options.threads} threads, "
        f"spin count {options.spin}, median of {options.times}"
    )
    fill(stored_kv(cache.tensor, info.geometry))
    for name in options.cases.split(","):
        batch = make_batch(name, Blocks(cache.num_blocks))
        clock = time.process_time if options.cpu_time else time.perf_counter
        taken = measure(runner, batch, options.times, clock)
        spread = f"[{min(taken):.1f} - {max(taken):.1f}]"
        print(f"{name:12} {statistics.median(taken):8.2f} ms {spread}", flush=True)
        for item in batch.items:
            runner.forget(item.request.request_id)
    return 0


def fill(cache: "StoredKV") -> None:
    """Memory that was never written is one page of zeros, read from a cache."""
    if cache.scales is None:
        cache.rows.normal_()
        return
    import torch

    cache.rows.view(torch.int8).random_(-100, 100)
    cache.scales.fill_(0.02)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--kv", default="auto", choices=("auto", "bf16", "fp8_e4m3", "int8"))
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--spin", type=int, default=20_000)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, on a busy machine")
    return parser.parse_args()


def make_batch(name: str, blocks: Blocks) -> "Batch":
    """The batch of a case; its contexts count as computed already."""
    from pdcluster_worker.engine.request import Batch

    found = re.fullmatch(r"([a-z]+)(\d*)", name)
    kind, number = found.groups() if found else (name, "")
    match kind:
        case "decode" | "long" | "deep":
            context = {"decode": 283, "long": 1037, "deep": 2048}[kind]
            items = [scheduled(f"r{index}", context, 1, blocks) for index in range(int(number))]
        case "prefill":
            items = [scheduled("p", int(number), int(number), blocks)]
        case "chunk":
            items = [scheduled("p", 1024, int(number), blocks)]
        case "mixed":
            items = [
                *(scheduled(f"r{index}", 283, 1, blocks) for index in range(15)),
                scheduled("p", 256, 241, blocks),
            ]
        case _:
            raise SystemExit(
                f"unknown case {name}: choose decodeB, longB, deepB, prefillN, chunkN or mixed"
            )
    return Batch(tuple(items))


def scheduled(name: str, context: int, num_tokens: int, blocks: Blocks) -> "Scheduled":
    """The last `num_tokens` of a request of `context` tokens."""
    from pdcluster_worker.engine.request import EngineRequest, Scheduled
    from pdcluster_worker.messages.requests import SamplingParams

    tokens = [random.Random(f"{name}{place}").randrange(40_000) for place in range(context)]
    sampling = SamplingParams(max_tokens=100, seed=0, temperature=0.0)
    request = EngineRequest(name, tokens, context, sampling, block_table=blocks.take(context))
    request.num_computed_tokens = context - num_tokens
    return Scheduled.of(request, num_tokens)


def measure(
    runner: "Runner", batch: "Batch", times: int, clock: Callable[[], float]
) -> list[float]:
    """Milliseconds of each run of the same step, after a few that do not count."""
    taken = []
    for turn in range(WARM_UP + times):
        start = clock()
        runner.execute(batch)
        if turn >= WARM_UP:
            taken.append((clock() - start) * 1e3)
    return taken


if __name__ == "__main__":
    raise SystemExit(main())
