"""Cost of sampling in a step: milliseconds by batch size and by the requests' settings.

    bench/sampling.py [--threads 2] [--rows 1 16 128] [--times 15] [--kernels]

Logits are random, as wide as SmolLM2's vocabulary and about as peaked as a chat
model's: most of the mass on some hundred tokens.  Each request has 300 tokens,
64 of them output.  A figure is the median of `--times` calls.  With `--kernels` gcc
compiles ops/kernels/sample.c for this CPU, and one thread runs it.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.ops.kernel_arguments import kernel_operations
from pdcluster_worker.model.ops.kernel_object import Kernels, find_kernels
from pdcluster_worker.model.sampling.sampler import PLAIN_TENSORS, RowOperations, Sampler

VOCAB_SIZE = 49_152
NUM_TOKENS = 300
NUM_PROMPT_TOKENS = 236
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "greedy + penalties": {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "top_p 0.95 + penalties": {"top_p": 0.95, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "greedy, 8 biases": {"temperature": 0.0, "logit_bias": {n * 100: 1.0 for n in range(8)}},
    "greedy, logprobs 5": {"temperature": 0.0, "logprobs": 5},
}


def make_request(number: int, sampling: dict[str, Any]) -> EngineRequest:
    tokens = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=generator(number)).tolist()
    options = {"max_tokens": 1000, "seed": number, **sampling}
    return EngineRequest(f"r{number}", tokens, NUM_PROMPT_TOKENS, SamplingParams(**options))


def make_logits(num_rows: int) -> torch.Tensor:
    """[num_rows, VOCAB_SIZE]: a broad base and a few hundred tokens well above it."""
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator(num_rows)) * 2
    peaks = torch.randint(VOCAB_SIZE, (num_rows, 300), generator=generator(num_rows + 1))
    heights = 10 + torch.randn(num_rows, 300, generator=generator(num_rows + 2)).abs() * 4
    return logits.scatter(1, peaks, heights).bfloat16().float()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def compiled() -> RowOperations:
    kernels = find_kernels()
    if not isinstance(kernels, Kernels):
        raise SystemExit(kernels.reason)
    return kernel_operations(kernels.library)


def median_milliseconds(
    logits: torch.Tensor, sampling: dict[str, Any], times: int, choosing: RowOperations
) -> float:
    requests = [make_request(number, sampling) for number in range(len(logits))]
    sampler = Sampler(VOCAB_SIZE, choosing)
    seconds = []
    for _ in range(times + 2):  # two to warm up
        for number, request in enumerate(requests):
            request.tokens.append(number)
        start = time.perf_counter()
        sampler.sample(logits, requests)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:]) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    choosing = compiled() if options.kernels else PLAIN_TENSORS
    torch.set_num_threads(options.threads)
    print(
        f"| threads {options.threads}, ms | "
        + " | ".join(f"B={rows}" for rows in options.rows)
        + " |"
    )
    print("| --- |" + " --- |" * len(options.rows))
    batches = [make_logits(rows) for rows in options.rows]
    for name, sampling in SETTINGS.items():
        with torch.inference_mode():
            cells = [
                median_milliseconds(logits, sampling, options.times, choosing) for logits in batches
            ]
        print(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
