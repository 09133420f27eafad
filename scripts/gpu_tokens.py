"""Print greedy tokens of the prompts on stdin, one a line as ids, computed by the worker's runner
on the named device.

gpu_tokens.py MODEL_FOLDER cpu|cuda NUM_TOKENS
"""

import sys
from typing import Any

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.model import ModelConfig
from pdcluster_worker.engine.batch import Batch, Scheduled
from pdcluster_worker.engine.request import Request
from pdcluster_worker.messages.requests import Sampling
from pdcluster_worker.model.runner_opening import open_runner

BLOCK_SIZE = 16


def main(folder: str, device: Any, num_tokens: int) -> int:
    """Answer each line with a line; exits 1 where the runner computes elsewhere than it was asked
    to.
    """
    engine = EngineConfig(
        device=device, block_size=BLOCK_SIZE, max_model_len=1024, kv_cache_memory=256 << 20
    )
    runner, cache, _ = open_runner(ModelConfig("sample", folder, "float32"), engine, device)
    if cache.tensor.device.type != device:
        sys.stderr.write(
            f"asked for {device}, but the runner's KV cache is on {cache.tensor.device}\n"
        )
        return 1
    for line in sys.stdin:
        prompt = [int(token) for token in line.split()]
        print(*_greedy(runner, prompt, num_tokens), flush=True)
    return 0


def _greedy(runner: Any, prompt: list[int], num_tokens: int) -> list[int]:
    blocks = list(range(-(-(len(prompt) + num_tokens) // BLOCK_SIZE)))
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0, seed=0)
    request = Request("one", list(prompt), len(prompt), sampling, block_table=blocks)
    for _ in range(num_tokens):
        (sample,) = runner.execute(
            Batch((Scheduled.of(request, request.num_tokens - request.num_computed_tokens),))
        )
        request.num_computed_tokens = request.num_tokens
        request.tokens.append(sample.token_id)
    runner.forget("one")
    return request.tokens[len(prompt) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
