"""Measures perplexity over quantized KV, and greedy tokens beside those over bf16 KV.

    bench/kv_quality.py [--model FOLDER] [--dtype DTYPE] [--windows N] [--tokens N] [--output N]
    [--threads N]

The text is that of Python's own help (`pydoc_data.topics`), in windows of so many tokens.
Perplexity is of all windows. `same best token`: positions of the text at which the most probable
token is that of bf16 KV. `same prefix`: greedy output tokens, of all, before the first that
differs from bf16's.
"""

import argparse
import math
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pdcluster_worker.config.engine import EngineConfig, KvCacheDtype
from pdcluster_worker.config.worker import ModelConfig
from pdcluster_worker.engine.ports import Sample
from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.runner_loader import open_runner

MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct").expanduser()
KINDS: list[KvCacheDtype] = ["bf16", "int8", "fp8_e4m3", "auto"]
BLOCK = 16


@dataclass
class Found:
    block_bytes: int
    logprobs: list[float]
    best: list[int]
    outputs: list[list[int]]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def main() -> int:
    """Print a line for each dtype of KV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    windows = windows_of(options.model, options.windows, options.tokens)
    print(f"model computed in {options.dtype}, {len(windows)} windows of {options.tokens} tokens")
    base: Found | None = None
    for kind in KINDS:
        found = measure(kind, options, windows)
        base = base or found
        print(line(kind, found, base), flush=True)
    return 0


def windows_of(model: Path, count: int, size: int) -> list[list[int]]:
    """The text is cut where it begins: tokens of later windows have no context of earlier ones."""
    text = "\n".join(value for _, value in sorted(pydoc_data.topics.topics.items()))
    ids: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    step = len(ids) // count
    return [ids[at * step : at * step + size] for at in range(count)]


def measure(kind: KvCacheDtype, options: argparse.Namespace, windows: list[list[int]]) -> Found:
    """Score each window in chunks of a quarter, then continue its first half."""
    engine = EngineConfig(
        max_batched_tokens=options.tokens,
        kv_cache_memory=1 << 30,
        kv_cache_dtype=kind,
        threads=options.threads,
    )
    model = ModelConfig("m", str(options.model), options.dtype)
    runner, cache, _ = open_runner(model, engine)
    found = Found(cache.block_bytes, [], [], [])
    try:
        for window in windows:
            score(runner, window, found)
            found.outputs.append(go_on(runner, window[: options.tokens // 2], options.output))
    finally:
        runner.close()
    return found


def score(runner: Any, window: list[int], found: Found) -> None:
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=1)
    sample = run(runner, request_of("score", window, sampling), chunk=len(window) // 4)
    for one in sample.prompt_logprobs:
        found.logprobs.append(one.logprob)
        found.best.append(one.top_logprobs[0][0])
    runner.forget("score")


def go_on(runner: Any, prompt: list[int], num_output: int) -> list[int]:
    sampling = SamplingParams(max_tokens=num_output, seed=0, temperature=0.0)
    request = request_of("go on", prompt, sampling)
    while request.num_output_tokens < num_output:
        sample = run(runner, request, chunk=len(prompt))
        request.tokens.append(sample.token_id)
    runner.forget("go on")
    return request.tokens[len(prompt) :]


def request_of(name: str, prompt: list[int], sampling: SamplingParams) -> EngineRequest:
    request = EngineRequest(name, list(prompt), len(prompt), sampling)
    request.block_table.extend(range(-(-(len(prompt) + sampling.max_tokens) // BLOCK)))
    return request


def run(runner: Any, request: EngineRequest, chunk: int) -> Sample:
    """Compute all tokens that are not; the last sample."""
    while True:
        left = request.num_tokens - request.num_computed_tokens
        item = Scheduled.of(request, min(chunk, left))
        (outcome,) = runner.execute(Batch((item,)))
        request.num_computed_tokens += item.num_tokens
        if item.num_tokens == left:
            assert isinstance(outcome, Sample), outcome
            return outcome


def line(kind: str, found: Found, base: Found) -> str:
    same = sum(one == other for one, other in zip(found.best, base.best, strict=True))
    outputs = list(zip(found.outputs, base.outputs, strict=True))
    kept = sum(common(one, other) for one, other in outputs)
    total = sum(len(one) for one, _ in outputs)
    change = 100 * (found.perplexity / base.perplexity - 1)
    return (
        f"{kind:9} block {found.block_bytes:7} bytes, perplexity {found.perplexity:.4f} "
        f"({change:+.2f} %), same best token {100 * same / len(found.best):.2f} % of "
        f"{len(found.best)}, same prefix {kept} of {total}"
    )


def common(one: list[int], other: list[int]) -> int:
    for at, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if mine != theirs:
            return at
    return len(one)


if __name__ == "__main__":
    raise SystemExit(main())
