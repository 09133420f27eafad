"""Milliseconds of a decode step with and without a second step submitted while one computes
(`engine/in_flight`).

    bench/steps_ahead.py [--requests 1 16 64] [--threads 1 2] [--steps 60] [--rounds 3] [--tp N]

The real core over the real runner, SmolLM2-135M, outputs encoded as for the server
process.  The ways take turns, round by round.  Run it on a machine that does nothing else.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdcluster_worker.engine.core import EngineCore
    from pdcluster_worker.model.runner import Runner

MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct")
PROMPT_TOKENS, BLOCKS = 300, 3000


def main() -> None:
    """Print a line for each number of requests and threads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    # as the engine process has it; read when torch is imported
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["GOMP_SPINCOUNT"] = "20000"
    runners = make_runners(options.threads, options.tp)
    for num_requests in options.requests:
        taken: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(options.rounds):
            for name, runner in runners.items():
                taken[name] += measure(runner, num_requests, options.steps)
        figures = {name: statistics.median(seconds) * 1e3 for name, seconds in taken.items()}
        ratio = figures["ahead"] / figures["one by one"]
        words = ", ".join(f"{name} {figure:.2f} ms" for name, figure in figures.items())
        print(
            f"{num_requests} decodes, {options.threads} threads, tp {options.tp}: {words}, "
            f"{ratio:.3f}x",
            flush=True,
        )
    next(iter(runners.values())).close()


def make_runners(threads: int, tensor_parallel_size: int) -> dict[str, "Runner"]:
    """Both ways over one loaded model."""
    from pdcluster_worker.config.engine import EngineConfig
    from pdcluster_worker.config.worker import ModelConfig
    from pdcluster_worker.model.runner import Runner
    from pdcluster_worker.model.runner_loader import open_runner
    from pdcluster_worker.model.step_plan import StepLimits

    engine = EngineConfig(
        max_batched_tokens=2048,
        num_blocks=BLOCKS,
        threads=threads,
        tensor_parallel_size=tensor_parallel_size,
    )
    opened, cache, info = open_runner(
        ModelConfig(name="m", path=str(MODEL), dtype="bfloat16"), engine
    )
    limits = StepLimits.of(engine, info.max_model_len)
    return {
        "one by one": Runner(info, opened.forward, cache, limits),
        "ahead": Runner(info, opened.forward, cache, limits, depth=2, in_thread=True),
    }


def measure(runner: "Runner", num_requests: int, num_steps: int) -> list[float]:
    """Seconds of each step in which all requests decode."""
    from pdcluster_worker.messages import engine as messages

    core = started(runner, num_requests)
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        messages.encode(core.step())
        seconds.append(time.perf_counter() - start)
    for number in range(num_requests):
        core.handle(messages.Abort(f"r{number}"))
    while core.has_work:
        core.step()
    return seconds


def started(runner: "Runner", num_requests: int) -> "EngineCore":
    """An engine in which that many requests decode."""
    from pdcluster_worker.engine.core import EngineCore
    from pdcluster_worker.messages.engine import Submit
    from pdcluster_worker.messages.engine_settings import EngineSettings
    from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
    from pdcluster_worker.testing import FakeNetwork, FakeTransport

    settings = EngineSettings(16, BLOCKS, 2048, 128, 4096)
    network = FakeNetwork()
    # which moves nothing here
    transport = FakeTransport(network, runner._cache, "engine", time.monotonic)
    core = EngineCore(settings, runner, transport, time.monotonic)
    for number in range(num_requests):
        prompt = [(7919 * number + 31 * place) % 40_000 for place in range(PROMPT_TOKENS)]
        core.handle(
            Submit(
                RequestSpec(
                    f"r{number}",
                    prompt,
                    SamplingParams(max_tokens=3000, seed=number, temperature=0.0, ignore_eos=True),
                )
            )
        )
    for _ in range(PROMPT_TOKENS * num_requests // settings.max_batched_tokens + 6):
        core.step()
    return core


if __name__ == "__main__":
    main()
