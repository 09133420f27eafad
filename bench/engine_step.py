"""The engine's own part of a decode step, without the model: scheduling, taking tokens, statistics,
encoding and sending.

    python bench/engine_step.py [--requests 16 128] [--steps 200]

The core is the real one, the runner answers at once with drawn tokens, and its
time is taken off.  Outputs go through a real ZMQ socket to a process that drops
them.  Between two steps memory is read, so caches are as cold as after a model's step.
"""

import argparse
import gc
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence

import zmq

from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.engine.ports import RowOutcome, Sample, StepSeconds
from pdcluster_worker.engine.request import Batch, EngineRequest
from pdcluster_worker.messages.engine import Submit
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdcluster_worker.processes.engine_mailbox import EngineSocket
from pdcluster_worker.structured_output.grammar_cache import GrammarCache
from pdcluster_worker.testing import FakeNetwork, FakeTransport

VOCABULARY = 49152
PROMPT_TOKENS = 300
WEIGHTS = bytearray(128 << 20)
"""Read between two steps, as a model's are: what a step finds in the caches then is next to
nothing.
"""
SETTINGS = EngineSettings(
    block_size=16,
    num_blocks=20_000,
    max_batched_tokens=8192,
    max_sequences=256,
    max_model_len=4096,
    prefix_caching=True,
    fence_timeout_seconds=5.0,
)


class NoModel:
    """A ModelRunner without a model.  took: seconds of the last step."""

    heads, head_bytes, num_blocks = range(1), 16, SETTINGS.num_blocks
    seconds, depth = StepSeconds(), 1
    grammars = GrammarCache(VOCABULARY)
    took = 0.0
    outcomes: Sequence[RowOutcome] = ()

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def begin(self, batch: Batch, sampled: Mapping[EngineRequest, int]) -> None:
        start = time.perf_counter()
        self.outcomes = [
            Sample(random.randrange(VOCABULARY)) if item.samples else None for item in batch.items
        ]
        self.took = time.perf_counter() - start

    def wait(self, batch: Batch) -> Sequence[RowOutcome]:
        return self.outcomes

    def forget(self, request_id: str) -> None: ...

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        return memoryview(bytearray(self.head_bytes))

    staging = block

    def write_block(
        self, block_id: int, staging: memoryview, heads: range | None = None
    ) -> None: ...


def drop(address: str) -> None:
    """The other process: receive until an empty frame comes."""
    socket = zmq.Context().socket(zmq.PAIR)
    socket.bind(address)
    while socket.recv():
        pass


def started(runner: NoModel, num_requests: int) -> EngineCore:
    """An engine that decodes that many requests."""
    transport = FakeTransport(FakeNetwork(), runner, "engine", time.monotonic)
    core = EngineCore(SETTINGS, runner, transport, time.monotonic)
    for number in range(num_requests):
        prompt = [random.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        core.handle(
            Submit(
                RequestSpec(
                    f"chatcmpl-{number:032d}-0",
                    prompt,
                    SamplingParams(max_tokens=3000, seed=0, ignore_eos=True),
                )
            )
        )
    for _ in range(PROMPT_TOKENS * num_requests // SETTINGS.max_batched_tokens + 2):
        core.step()
    return core


def measure(mailbox: EngineSocket, num_requests: int, num_steps: int) -> None:
    """Print milliseconds of a step."""
    runner = NoModel()
    core = started(runner, num_requests)
    gc.collect()
    gc.freeze()
    seconds = []
    for _ in range(num_steps):
        WEIGHTS.count(1)
        start = time.perf_counter()
        mailbox.receive(0.0)
        mailbox.send(core.step())
        seconds.append(time.perf_counter() - start - runner.took)
    median, late = statistics.median(seconds), sorted(seconds)[num_steps * 99 // 100]
    print(f"{num_requests} decodes: {median * 1e3:.2f} ms a step, p99 {late * 1e3:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        other = multiprocessing.Process(
            target=drop, args=(address := f"ipc://{folder}/engine",), daemon=True
        )
        other.start()
        mailbox = EngineSocket(address)
        for num_requests in options.requests:
            measure(mailbox, num_requests, options.steps)
        other.terminate()
        other.join()


if __name__ == "__main__":
    main()
