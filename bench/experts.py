"""CPU time of steps of a model with experts, by our decoder and by transformers' module over our
attention and products: a random Qwen3-MoE of 32 experts, 4 for a token.

    bench/experts.py [--dtype DTYPE] [--times N]

Times are CPU time of one thread for a step of so many decodes, or a prompt of so many tokens; both
kinds in turns.  A line has the medians and the ratio of theirs to ours, with its tenths.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loading.loader import DTYPES, load_model
from pdcluster_worker.model.loading.support import read_config
from pdcluster_worker.model.loading.transformers_loader import load_module
from pdcluster_worker.model.runner_loader import make_runner

SIZES = {
    "vocab_size": 2048,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
CASES = {"1 decode": (1, 1), "16 decodes": (16, 1), "prompt of 256": (1, 256)}
CONTEXT, BLOCK, NUM_BLOCKS = 64, 16, 512


def main() -> int:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--times", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runners = opened(Path(folder), options.dtype)
    ours = runners["ours"].forward
    print(f"{options.dtype}, {ours.operations.name}, {options.times} rounds, {SIZES}")
    for name, (count, length) in CASES.items():
        taken: dict[str, list[float]] = {kind: [] for kind in runners}
        for turn in range(options.times + 2):
            for kind, runner in runners.items():
                seconds = step_seconds(runner, count, length)
                if turn > 1:
                    taken[kind].append(seconds)
        ratios = [b / a for a, b in zip(taken["ours"], taken["transformers"], strict=True)]
        tenths = statistics.quantiles(ratios, n=10)
        medians = {kind: 1000 * statistics.median(seconds) for kind, seconds in taken.items()}
        print(
            f"{name:14} ours {medians['ours']:.2f} ms, transformers {medians['transformers']:.2f} "
            f"ms, ratio {statistics.median(ratios):.2f} [{tenths[0]:.2f} - {tenths[-1]:.2f}]",
            flush=True,
        )
    return 0


def opened(folder: Path, dtype: str) -> dict[str, Any]:
    """A runner by each code, over the same weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    loaded = load_model(folder, dtype, block_size=BLOCK, threads=1, max_model_len=1024)
    assert loaded.checkpoint is not None
    module, _, _ = load_module(folder, read_config(folder), DTYPES[dtype], 1024)
    kinds = {"ours": loaded, "transformers": replace(loaded, checkpoint=None, module=module)}
    engine = EngineConfig(max_batched_tokens=512, max_sequences=32, threads=1)
    return {
        kind: make_runner(each, KVCache(loaded.info.geometry, NUM_BLOCKS), engine)
        for kind, each in kinds.items()
    }


def step_seconds(runner: Any, count: int, length: int) -> float:
    """CPU time of a step of `count` requests with `length` new tokens, the last of a context."""
    before = 0 if length > 1 else CONTEXT
    blocks = -(-(before + length) // BLOCK)
    items = []
    for at in range(count):
        tokens = [(31 * place + 7 * at) % SIZES["vocab_size"] for place in range(before + length)]
        sampling = SamplingParams(max_tokens=8, seed=0, temperature=0.0)
        table = list(range(at * blocks, (at + 1) * blocks))
        request = EngineRequest(str(at), tokens, len(tokens), sampling, block_table=table)
        request.num_computed_tokens = before
        items.append(Scheduled.of(request, length))
    start = time.process_time()
    runner.execute(Batch(tuple(items)))
    seconds = time.process_time() - start
    for item in items:
        runner.forget(item.request.request_id)
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
