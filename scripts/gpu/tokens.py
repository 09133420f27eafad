"""Greedy tokens of tiny models on the device beside those on the CPU, in float32 and bfloat16.

tokens.py FIGURES                       all models of the pack
tokens.py FOLDER DTYPE cpu|cuda         the tokens of the prompts, one list a line
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from setting import PACK, REHEARSES, save

PROMPTS = ([1, 2, 3], list(range(5, 300)), [7] * 33)
NUM_TOKENS = 24
BLOCK_SIZE = 16


def main() -> int:
    """Compare; in float32 each token must be equal, in bfloat16 they are counted."""
    figures: dict[str, Any] = {}
    worst = 0
    for folder in sorted((PACK / "models").iterdir()):
        for dtype in ("float32", "bfloat16"):
            on_cpu, on_gpu = (
                _of_a_process(folder, dtype, device)
                for device in ("cpu", "cpu" if REHEARSES else "cuda")
            )
            pairs = [
                pair
                for ours, theirs in zip(on_cpu, on_gpu, strict=True)
                for pair in zip(ours, theirs, strict=True)
            ]
            equal = sum(one == other for one, other in pairs)
            figures[f"{folder.name} {dtype}"] = {"equal": equal, "of": len(pairs)}
            print(f"{folder.name} {dtype}: {equal} of {len(pairs)} tokens equal", flush=True)
            worst |= dtype == "float32" and equal < len(pairs)
    save(figures)
    return int(worst)


def _of_a_process(folder: Path, dtype: str, device: str) -> list[list[int]]:
    """In a process of its own: two models share no memory, and neither its threads."""
    command = [sys.executable, __file__, str(folder), dtype, device]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lists: list[list[int]] = json.loads(found.stdout.splitlines()[-1])
    return lists


def tokens(folder: str, dtype: Any, device: Any) -> list[list[int]]:
    """The tokens of all prompts by the worker's own runner."""
    from pdcluster_worker.config.engine import EngineConfig
    from pdcluster_worker.config.worker import ModelConfig
    from pdcluster_worker.model.runner_loader import open_runner

    engine = EngineConfig(
        device=device,
        block_size=BLOCK_SIZE,
        max_batched_tokens=512,
        max_model_len=1024,
        kv_cache_memory=256 << 20,
    )
    runner, cache, _ = open_runner(ModelConfig("sample", folder, dtype), engine, device)
    assert cache.tensor.device.type == device, f"the KV cache is on {cache.tensor.device}"
    return [_greedy(runner, prompt) for prompt in PROMPTS]


def _greedy(runner: Any, prompt: list[int]) -> list[int]:
    from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
    from pdcluster_worker.messages.requests import SamplingParams

    blocks = list(range(-(-(len(prompt) + NUM_TOKENS) // BLOCK_SIZE)))
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, seed=0)
    request = EngineRequest("one", list(prompt), len(prompt), sampling, block_table=blocks)
    for _ in range(NUM_TOKENS):
        (sample,) = runner.execute(
            Batch((Scheduled.of(request, request.num_tokens - request.num_computed_tokens),))
        )
        request.num_computed_tokens = request.num_tokens
        request.tokens.append(sample.token_id)
    runner.forget("one")
    return request.tokens[len(prompt) :]


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(tokens(*sys.argv[1:])))
        sys.exit(0)
    sys.exit(main())
