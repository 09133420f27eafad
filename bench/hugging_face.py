"""Hugging Face `generate()` under test: a child process that answers static batches.

A static batch is what `generate()` offers: requests that are waiting when it is
idle go in together (at most MAX_BATCH), and the next wait for the whole batch.
The child writes a line for each step, from the streamer that `generate()` calls
as it picks a step's tokens; the parent stamps the line as it stamps our chunks,
on its own clock.  Shorter prompts of a batch are filled up on the left.  All
answers of a workload have the same length.  The child is this file, run with
the folder and the threads.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from footprint import Footprint
from stats import EngineCounters
from system import Address

from pdcluster_api.errors import IncompleteAnswerError, StartError
from pdctl.bench.load import BenchRequest, OnChunk, TokenUsage
from pdctl.bench.measure import START_LIMIT_SECONDS, end_process

MAX_BATCH = 16  # A's concurrency, so that each of its batches is full
# Clients that wait for one batch send their next requests together; this lets all of them arrive.
_GATHER_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class _Waiting:
    prompt: list[int]
    ask: BenchRequest
    on_chunk: OnChunk
    num_tokens: asyncio.Future[int]


@asynccontextmanager
async def running_generate(
    name: str, model: Path, num_threads: int
) -> AsyncIterator["HuggingFace"]:
    """The child from its model in memory to its end.  Raises StartError when it does not start."""
    start = time.monotonic()
    command = (__file__, str(model), str(num_threads))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=PIPE, stdout=PIPE, start_new_session=True
    )
    try:
        said = await _first_line(process)
        system = HuggingFace(name, time.monotonic() - start, said, process)
        batches = asyncio.create_task(system.serve())
        try:
            yield system
        finally:
            batches.cancel()
    finally:
        await end_process(process)


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """The parent's side: a queue, and one batch at a time in the child.  said: the child's first
    line.
    """

    name: str
    start_seconds: float
    said: dict[str, Any]
    process: Process
    queue: asyncio.Queue[_Waiting] = field(default_factory=asyncio.Queue)

    @property
    def address(self) -> Address | None:
        """It takes no HTTP."""
        return None

    async def send(self, ask: BenchRequest, on_chunk: OnChunk) -> TokenUsage:
        """See `load.Target`; prompts are token ids."""
        if isinstance(ask.prompt, str):
            raise IncompleteAnswerError("this child has no tokenizer: send token ids")
        waiting = _Waiting(ask.prompt, ask, on_chunk, asyncio.get_running_loop().create_future())
        self.queue.put_nowait(waiting)
        return TokenUsage(await waiting.num_tokens)

    async def engine_counters(self) -> dict[str, EngineCounters]:
        """It has no engine that counts."""
        return {}

    async def footprints(self, seconds: float) -> list[Footprint]:
        """Not measured: the limits on an idle worker are ours."""
        return []

    def conditions(self) -> list[str]:
        """Lines that the child logged as it loaded the model."""
        setting = f"dtype {self.said['dtype']}, threads {self.said['threads']}"
        return [
            f"{self.name}: {setting}, static batches of at most {MAX_BATCH}, timed step by step "
            "through generate()'s streamer"
        ]

    async def serve(self) -> None:
        """Batch after batch, until cancelled."""
        while True:
            batch = [await self.queue.get()]
            await asyncio.sleep(_GATHER_SECONDS)
            while len(batch) < MAX_BATCH and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            await self._answer([waiting for waiting in batch if not waiting.num_tokens.done()])

    async def _answer(self, batch: list[_Waiting]) -> None:
        outcome: int | IncompleteAnswerError
        try:
            outcome = await self._run(batch) if batch else 0
        except (IncompleteAnswerError, ConnectionError) as e:
            outcome = IncompleteAnswerError(f"the child is gone: {e}")
        for waiting in batch:
            if not waiting.num_tokens.done():  # its client may have given up
                _settle(waiting.num_tokens, outcome)

    async def _run(self, batch: list[_Waiting]) -> int:
        """One `generate()`; returns the tokens of each answer."""
        assert self.process.stdin is not None
        first = batch[0].ask
        prompts = [waiting.prompt for waiting in batch]
        job = {
            "prompts": prompts,
            "num_output_tokens": first.num_output_tokens,
            "temperature": first.temperature,
        }
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        while (line := await _line(self.process)) == b"step\n":
            for waiting in batch:
                waiting.on_chunk()
        return int(line)


def _settle(future: asyncio.Future[int], outcome: int | IncompleteAnswerError) -> None:
    if isinstance(outcome, IncompleteAnswerError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


async def _first_line(process: Process) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads(
            await asyncio.wait_for(_line(process), START_LIMIT_SECONDS)
        )
    except (TimeoutError, IncompleteAnswerError) as e:
        raise StartError(f"generate() did not start: {e!r}; its error is above", exit_code=1) from e
    return said


async def _line(process: Process) -> bytes:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise IncompleteAnswerError("its output ended")
    return line


def serve_batches(folder: str, num_threads: int, out: IO[str]) -> None:
    """The child: load the model, then for each job on stdin a "step" line a step and a line with
    the tokens of each answer.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from pdcluster_worker.system.native_dtype import read_native_dtype

    class Steps:
        """Streamer that `generate()` calls: with the prompts first, then with each
        step's tokens.
        """

        def __init__(self) -> None:
            self.has_prompt = False

        def put(self, value: torch.Tensor) -> None:
            if self.has_prompt:
                print("step", file=out, flush=True)
            self.has_prompt = True

        def end(self) -> None:
            pass

    disable_progress_bar()
    torch.set_num_threads(num_threads)
    # The dtype that our workers choose for `dtype: auto`: one machine, one dtype for all.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=read_native_dtype(), local_files_only=True
    ).eval()
    print(
        json.dumps(
            {"dtype": str(model.dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
        ),
        file=out,
        flush=True,
    )
    for line in sys.stdin:
        job = json.loads(line)
        prompts, num_tokens = job["prompts"], job["num_output_tokens"]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        )
        lengths = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        # top_k 0: all tokens, as the servers draw; the model's generation config may say otherwise.
        drawn: dict[str, Any] = {"do_sample": bool(job["temperature"])}
        if job["temperature"]:
            drawn |= {"temperature": job["temperature"], "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            answers = model.generate(ids, attention_mask=mask, streamer=Steps(), **drawn, **lengths)
        print(answers.shape[1] - longest, file=out, flush=True)


if __name__ == "__main__":
    # The protocol keeps the real stdout; what a library prints goes to stderr.
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve_batches(sys.argv[1], int(sys.argv[2]), protocol)
