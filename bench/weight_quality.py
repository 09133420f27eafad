"""Measures weights in 8 bits beside bf16: bytes, CPU time of steps, perplexity and greedy tokens.

    bench/weight_quality.py [--model FOLDER] [--dtype DTYPE] [--windows N] [--tokens N] [--output N]
    [--times N]

Text, windows, `same best token` and `same prefix` are those of `kv_quality.py`.  Times are CPU time
of one thread for a step of so many decodes, or a prompt of 256 tokens: the least of so many rounds,
in which the kinds take turns.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kv_quality import BLOCK, MODEL, Found, common, go_on, request_of, score, windows_of

from pdcluster_worker.config.engine import EngineConfig, WeightQuantization
from pdcluster_worker.config.worker import ModelConfig
from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.loading.loader import load_model
from pdcluster_worker.model.runner_loader import open_runner

KINDS: list[WeightQuantization] = ["none", "int8", "fp8_e4m3"]
DECODES, CONTEXT, PROMPT = (1, 4, 8, 32), 64, 256


@dataclass
class Measured:
    """seconds: of each case, the least."""

    num_bytes: int
    runner: Any
    found: Found
    seconds: dict[str, float] = field(default_factory=dict)


def main() -> int:
    """Print two lines for each precision."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--times", type=int, default=9)
    options = parser.parse_args()
    kinds = {kind: opened(kind, options) for kind in KINDS}
    for _ in range(options.times):
        for measured in kinds.values():
            time_steps(measured)
    windows = windows_of(options.model, options.windows, options.tokens)
    for measured in kinds.values():
        for window in windows:
            score(measured.runner, window, measured.found)
            prompt = window[: options.tokens // 2]
            measured.found.outputs.append(go_on(measured.runner, prompt, options.output))
        measured.runner.close()
    for kind, measured in kinds.items():
        print(line(kind, measured, kinds["none"]), flush=True)
    return 0


def opened(kind: WeightQuantization, options: argparse.Namespace) -> Measured:
    settings = {"max_batched_tokens": options.tokens, "kv_cache_memory": 1 << 28, "threads": 1}
    engine = EngineConfig(quantization=kind, **settings)
    sizes = load_model(options.model, options.dtype, block_size=BLOCK, quantization=kind)
    runner, cache, _ = open_runner(ModelConfig("m", str(options.model), options.dtype), engine)
    return Measured(sizes.weight_bytes, runner, Found(cache.block_bytes, [], [], []))


def time_steps(measured: Measured) -> None:
    runner = measured.runner
    cases: dict[str, Callable[[], Batch]] = {
        f"decode{count}": partial(decodes, count) for count in DECODES
    }
    cases[f"prompt{PROMPT}"] = prompt
    for name, make in cases.items():
        batch = make()
        started = time.process_time()
        runner.execute(batch)
        taken = time.process_time() - started
        for item in batch.items:
            runner.forget(item.request.request_id)
        measured.seconds[name] = min(taken, measured.seconds.get(name, taken))


def decodes(count: int) -> Batch:
    """Requests whose context is computed, as far as the kernels know."""
    return Batch(tuple(Scheduled.of(computed(at), 1) for at in range(count)))


def computed(at: int) -> EngineRequest:
    sampling = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
    request = request_of(f"decode-{at}", [7] * CONTEXT, sampling)
    request.block_table[:] = [block + 5 * at for block in request.block_table]
    request.num_computed_tokens = CONTEXT - 1
    return request


def prompt() -> Batch:
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    return Batch((Scheduled.of(request_of("prompt", [7] * PROMPT, sampling), PROMPT),))


def line(kind: str, measured: Measured, base: Measured) -> str:
    found, own = measured.found, base.found
    same = sum(one == other for one, other in zip(found.best, own.best, strict=True))
    kept = sum(common(one, other) for one, other in zip(found.outputs, own.outputs, strict=True))
    times = ", ".join(
        f"{name} {1e3 * seconds:.1f} ms ({seconds / base.seconds[name]:.2f}x)"
        for name, seconds in measured.seconds.items()
    )
    change = 100 * (found.perplexity / own.perplexity - 1)
    return (
        f"{kind:9} {measured.num_bytes / 1e6:.0f} MB of weights, perplexity {found.perplexity:.3f} "
        f"({change:+.2f} %), same best token {100 * same / len(found.best):.2f} % of "
        f"{len(found.best)}, same prefix {kept} of {sum(map(len, found.outputs))}\n{'':9} {times}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
