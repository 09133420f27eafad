"""Tokens per second of four LoRA adapters in one batch beside the model's alone: single steps of
the runner, both kinds in turns, by adapters of random weights.

    bench/adapters.py [--threads N] [--rank R] [--targets NAME,...] [--cases CASE,...] [--times N]
    [--cpu-time]

Cases are those of bench/steps.py; requests are of the adapters in turns.  Run it on a machine that
does nothing else.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from steps import MODEL, Blocks, fill, make_batch

NAMES = ("a", "b", "c", "d")
WARM_UP = 3


def main() -> int:
    """Print a line for each case."""
    options = parse()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["GOMP_SPINCOUNT"] = "20000"
    from pdcluster_worker.config.engine import EngineConfig
    from pdcluster_worker.config.worker import ModelConfig
    from pdcluster_worker.model.kv_size import stored_kv
    from pdcluster_worker.model.runner_loader import open_runner
    from tests.adapters import make_adapter

    model = MODEL.expanduser()
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            name: str(
                make_adapter(
                    model,
                    Path(folder) / name,
                    seed=seed,
                    rank=options.rank,
                    targets=options.targets.split(","),
                )
            )
            for seed, name in enumerate(NAMES)
        }
        engine = EngineConfig(
            max_batched_tokens=2048, kv_cache_memory=2 << 30, threads=options.threads
        )
        config = ModelConfig("m", str(model), "bfloat16", adapter_paths=paths)
        runner, cache, info = open_runner(config, engine)
    print(
        f"rank {options.rank} of {options.targets}, bfloat16, {options.threads} threads, "
        f"{runner.forward.operations.name}, {options.times} steps of each in turns"
    )
    clock = time.process_time if options.cpu_time else time.perf_counter
    fill(stored_kv(cache.tensor, info.geometry))
    for name in options.cases.split(","):
        batch = make_batch(name, Blocks(cache.num_blocks))
        taken: dict[str, list[float]] = {"base": [], "adapters": []}
        for turn in range(WARM_UP + options.times):
            for kind, seconds in taken.items():
                for at, item in enumerate(batch.items):
                    item.request.adapter = NAMES[at % 4] if kind == "adapters" else ""
                start = clock()
                runner.execute(batch)
                if turn >= WARM_UP:
                    seconds.append(clock() - start)
        print(line(name, batch.num_tokens, taken), flush=True)
        for item in batch.items:
            runner.forget(item.request.request_id)
    return 0


def line(name: str, num_tokens: int, taken: dict[str, list[float]]) -> str:
    """Tokens/s by the median step, the fastest and slowest tenth, and the ratio of medians."""
    parts = []
    for kind, seconds in taken.items():
        tenths = statistics.quantiles(seconds, n=10)
        low, middle, high = tenths[-1], statistics.median(seconds), tenths[0]
        spread = f"[{num_tokens / low:.0f} - {num_tokens / high:.0f}]"
        parts.append(f"{kind} {num_tokens / middle:.0f} tokens/s {spread}")
    base, adapters = (statistics.median(seconds) for seconds in taken.values())
    return f"{name:12} {', '.join(parts)}, ratio {base / adapters:.3f}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="q_proj,v_proj")
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--cases", default="decode4,decode16,decode64,prefill256,mixed")
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, on a busy machine")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
