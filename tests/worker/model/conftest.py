"""Real models, the real runner and transformers' generate() as the reference; only the scheduler is
a minimal loop.
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.engine.ports import Sample
from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loading.loader import load_model
from pdcluster_worker.model.runner_loader import make_runner
from tests.chat_model import chat_model


@pytest.fixture(scope="session")
def chat_model_folder() -> Path:
    """SmolLM2 as `make model` leaves it."""
    return chat_model()


class Reference:
    """transformers' generate(), greedy, in float32."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        self.model.generation_config.eos_token_id = None

    def greedy(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Tokens and the gap between the two best logits at each."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        top = torch.cat(out.logits).topk(2).values
        return out.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).tolist()


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Reference]:
    return functools.cache(Reference)


class Driver:
    """Steps requests through a runner as a scheduler would; every block of its cache starts as NaN,
    so a stray read shows.
    """

    def __init__(
        self,
        folder: Path,
        num_blocks: int = 256,
        dtype: str = "float32",
        threads: int = 1,
        **engine: Any,
    ) -> None:
        loaded = load_model(folder, dtype, block_size=16, threads=threads)
        self.cache = KVCache(loaded.info.geometry, num_blocks)
        self.runner = make_runner(
            loaded, self.cache, EngineConfig(max_batched_tokens=2048, max_sequences=64, **engine)
        )
        self.cache.tensor.fill_(float("nan"))
        # Scattered, so that nothing works only because blocks are neighbours.
        self._free = random.Random(7).sample(range(num_blocks), num_blocks)

    def request(self, name: str, prompt: Sequence[int], **sampling: Any) -> EngineRequest:
        options = {"max_tokens": 512, "seed": 0, "temperature": 0.0, **sampling}
        request = EngineRequest(name, list(prompt), len(prompt), SamplingParams(**options))
        self.allocate(request)
        return request

    def allocate(self, request: EngineRequest, num_more_tokens: int = 64) -> None:
        while len(request.block_table) * 16 < request.num_tokens + num_more_tokens:
            request.block_table.append(self._free.pop())

    def step(self, *items: tuple[EngineRequest, int]) -> list[Sample | Exception | None]:
        """Run one batch of (request, num_tokens) and take its results into the requests."""
        samples = self.runner.execute(
            Batch(tuple(Scheduled.of(request, count) for request, count in items))
        )
        for (request, count), sample in zip(items, samples, strict=True):
            request.num_computed_tokens += count
            if isinstance(sample, Sample):
                request.tokens.append(sample.token_id)
        return samples

    def finish(
        self, requests: Sequence[EngineRequest], num_output: int, chunk: int = 10_000
    ) -> None:
        """Step all together until each has `num_output` output tokens."""
        while left := [request for request in requests if request.num_output_tokens < num_output]:
            pending = [
                (request, min(chunk, request.num_tokens - request.num_computed_tokens))
                for request in left
            ]
            self.step(*sorted(pending, key=lambda item: item[1] > 1))

    def output(self, request: EngineRequest) -> list[int]:
        return request.tokens[request.num_prompt_tokens :]


@pytest.fixture(scope="session")
def make_driver() -> Callable[..., Driver]:
    return Driver


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Tiny models are faster on one thread; loading sets the process's count, so put it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
