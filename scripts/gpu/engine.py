"""Output tokens a second of the engine's core and runner over an 8B llama of random weights, in
this process: what `steps` measures, with scheduling, sampling and messages.
"""

import sys
import time
from typing import Any

from large_model import Large, open_large
from setting import REHEARSES, save, synchronize

from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.engine import Submit
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from tests.worker.fake_network import FakeNetwork, FakeTransport

PROMPT, OUTPUT = (20, 6) if REHEARSES else (512, 128)
STREAMS = (1, 2) if REHEARSES else (1, 16, 64, 256)
BLOCKS = 64 if REHEARSES else 16384
TOKENS = 64 if REHEARSES else 8192
WAYS = {"greedy": {"temperature": 0.0}, "top_p 0.9": {"temperature": 1.0, "top_p": 0.9}}


def main() -> int:
    """A line for each number of streams and way to sample."""
    large = open_large(num_blocks=BLOCKS, max_batched_tokens=TOKENS, max_sequences=max(STREAMS))
    settings = EngineSettings(16, BLOCKS, TOKENS, max(STREAMS), 16384, prefix_caching=False)
    figures: dict[str, Any] = {}
    run(large, settings, 1, WAYS["greedy"])  # kernels of a prefill are compiled
    for streams in STREAMS:
        for name, sampling in WAYS.items():
            if streams in (16, 256) and name != "greedy":
                continue
            run(large, settings, streams, sampling, output=3)
            found = figures[f"{streams} streams, {name}"] = run(large, settings, streams, sampling)
            print(f"{streams} streams of {PROMPT} + {OUTPUT}, {name}: {found}", flush=True)
            save(figures)
    return 0


def run(
    large: Large,
    settings: EngineSettings,
    streams: int,
    sampling: dict[str, Any],
    output: int = OUTPUT,
) -> dict[str, float]:
    """Serve that many requests which come at once."""
    transport = FakeTransport(FakeNetwork(), large.cache, "engine", time.monotonic)
    core = EngineCore(settings, large.runner, transport, time.monotonic)
    for number in range(streams):
        prompt = [10 + (7919 * number + 31 * place) % 400 for place in range(PROMPT)]
        spec = SamplingParams(max_tokens=output, seed=number, ignore_eos=True, **sampling)
        core.handle(Submit(RequestSpec(f"r{number}", prompt, spec)))
    synchronize()
    started, first, steps = time.perf_counter(), 0.0, 0
    while core.has_work:
        outputs = core.step()
        messages.encode(outputs)
        steps += bool(first)
        if not first and any(isinstance(one, messages.Tokens) for one in outputs):
            first = time.perf_counter() - started
    total = time.perf_counter() - started
    return {
        "output tokens/s": round(streams * output / total, 1),
        "seconds to the first token": round(first, 4),
        "ms a decode step": round((total - first) / max(1, steps) * 1e3, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
