"""Greedy tokens of our engine, and of vLLM, beside transformers' `generate()` in the same dtype; of
each path beside the others.

    bench/agreement.py [--dtype bfloat16 float32] [--prompts 54] [--tokens 64] [--vllm] [--log]

Prompts are chat questions and pieces of the LICENSE, so that a run can be
repeated.  Engines run in this process, as in tests/worker/equality: the real
model, scheduler, KV cache and transfer, without HTTP between; vLLM is the
server that `bench/run.py` measures.  Times mean nothing here, so load on the
machine does not matter.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from agreement_figures import Agreement, Tokens, agreement, agreement_table, until_end
from setting import LOG_HELP, keep_report, setting_lines
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_server import Served, check_installed, running_vllm

from pdcluster_api.errors import StartError
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdctl.bench.openai import COMPLETIONS, OpenAIServer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.chat_model import FOLDER  # noqa: E402 - the harness of the tests is this bench's too
from tests.worker.equality.engines import CONTINUOUS, Cluster  # noqa: E402 - found by the path above, too

GROUP = 18
PREEMPTED_BLOCKS = 64
"""Room for two or three of the long prompts, of which each group has six."""
TOPICS = (
    "the tides of the sea",
    "how bread rises",
    "the French Revolution",
    "photosynthesis",
    "why leaves turn red",
    "a bicycle's gears",
    "the rules of chess",
    "how vaccines work",
    "the life of a star",
    "double-entry bookkeeping",
    "how a violin makes sound",
    "the water cycle",
    "binary numbers",
    "the causes of inflation",
    "how bees find flowers",
    "plate tectonics",
    "the history of paper",
    "how a refrigerator cools",
)
ASKED = (
    "What do you know about {topic}?",
    "Explain {topic} to a student of twelve years, in a few sentences, with an example from daily "
    "life, and name a common error about it.",
    "Here is a text:\n\n{text}\n\nSay in two sentences what it is about, and what it has to do "
    "with {topic}.",
)
PATHS: dict[str, tuple[bool, dict[str, int]]] = {
    "local, whole prompts": (False, {"max_batched_tokens": 2048}),
    "local, chunks of 64": (False, {}),
    "remote": (True, {}),
    "preempted": (False, {"num_blocks": PREEMPTED_BLOCKS}),
}
"""Paths by name: whether the prefill is remote, and the decode engine's settings.

Prompts run 18 together, as they do under load.
"""

DEFINITIONS = """\
- Model: SmolLM2-135M-Instruct as `make model` leaves it. An answer ends with the
  end-of-sequence token, which counts.
- Equal answers: all tokens are the same. Equal tokens: those before the first difference, of
  all that were expected; what follows a difference is another answer and is not compared.
- Margin there: the best minus the second best logit at the first differences, median and
  greatest, by one forward pass of transformers' model in the same dtype over the prompt and
  what both answers had said.
- Between the best two: both tokens of the first difference are the two that this pass finds
  likeliest."""


@dataclass(frozen=True)
class Work:
    """Prompts that every source answers.  end: the model's end-of-sequence token, with which an
    answer ends.
    """

    prompts: Sequence[list[int]]
    num_tokens: int
    end: int


class Generate:
    """transformers on a model folder, in one dtype."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True
        ).eval()

    def answers(self, work: Work, size: int) -> list[Tokens]:
        """`generate()` over batches of so many prompts, filled up on the left."""
        found: list[Tokens] = []
        for start in range(0, len(work.prompts), size):
            batch = work.prompts[start : start + size]
            longest = max(map(len, batch))
            ids = torch.tensor([[work.end] * (longest - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor(
                [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch]
            )
            lengths = {
                "max_new_tokens": work.num_tokens,
                "eos_token_id": work.end,
                "pad_token_id": work.end,
            }
            made = self._model.generate(ids, attention_mask=mask, do_sample=False, **lengths)
            found += [until_end(row, work.end) for row in made[:, longest:].tolist()]
        return found

    def margin(self, tokens: Tokens, either: set[int]) -> tuple[float, bool]:
        """Best minus second best logit after the tokens, and whether `either` is these two."""
        with torch.inference_mode():
            best = self._model(torch.tensor([list(tokens)])).logits[0, -1].float().topk(2)
        return float(best.values[0] - best.values[1]), set(best.indices.tolist()) == either


def questions(count: int) -> list[str]:
    """So many questions: short, longer, and with a text of 100 to 270 words, in turn."""
    words = (ROOT / "LICENSE").read_text().split()
    texts = [
        " ".join(words[70 * index : 70 * index + 100 + 10 * index]) for index in range(len(TOPICS))
    ]
    pairs = list(zip(TOPICS, texts, strict=True))
    return [
        ASKED[index % len(ASKED)].format(topic=topic, text=text)
        for index in range(count)
        for topic, text in [_turn(pairs, index)]
    ]


def _turn(pairs: Sequence[tuple[str, str]], index: int) -> tuple[str, str]:
    return pairs[index // len(ASKED) % len(pairs)]


def path_answers(path: str, folder: Path, dtype: Any, work: Work) -> list[Tokens]:
    """Our engine's answers on one path.  Raises RuntimeError when the path was not taken."""
    remote, settings = PATHS[path]
    cluster = Cluster(folder, dtype=dtype, scheduler=CONTINUOUS, **settings)
    sampling = SamplingParams(
        max_tokens=work.num_tokens, seed=0, temperature=0.0, eos_token_ids=[work.end]
    )
    specs = [
        RequestSpec(f"r{index}", prompt, sampling) for index, prompt in enumerate(work.prompts)
    ]
    found: list[Tokens] = []
    for start in range(0, len(specs), GROUP):
        answers = cluster.run(specs[start : start + GROUP], remote=remote)
        found += [until_end([token.token_id for token in answer], work.end) for answer in answers]
    stats = cluster.decode.stats
    assert stats is not None
    if (stats.bytes_received > 0) != remote or (stats.preemptions > 0) != path.startswith(
        "preempted"
    ):
        raise RuntimeError(
            f"{path}: {stats.bytes_received} bytes came and {stats.preemptions} requests were "
            "preempted: not this path"
        )
    return found


async def vllm_answers(folder: Path, dtype: str, work: Work) -> list[Tokens]:
    """vLLM's answers, as many prompts together as on our paths.  Raises StartError."""
    found: list[Tokens] = []
    async with running_vllm("vllm", Served(folder, 1, dtype)) as system:
        for start in range(0, len(work.prompts), GROUP):
            group = work.prompts[start : start + GROUP]
            answers = await asyncio.gather(
                *(_vllm_answer(system.server, prompt, work) for prompt in group)
            )
            found += [until_end(answer, work.end) for answer in answers]
    return found


async def _vllm_answer(server: OpenAIServer, prompt: list[int], work: Work) -> Tokens:
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": work.num_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    async with server.session.post(server.base_url + COMPLETIONS, json=body) as response:
        text = await response.text()
    if response.status != 200:
        raise StartError(f"vLLM answered HTTP {response.status}: {text[:200]}", exit_code=1)
    tokens: list[int] = json.loads(text)["choices"][0]["token_ids"]
    return tokens


def compare(folder: Path, dtype: Any, work: Work, *, with_vllm: bool = False) -> str:
    """All comparisons in one dtype, as two tables."""
    reference = Generate(folder, getattr(torch, dtype))

    def judge(index: int, said: Tokens, expected: int, actual: int) -> tuple[float, bool]:
        return reference.margin([*work.prompts[index], *said], {expected, actual})

    ours, batched = next(iter(PATHS)), f"generate() in batches of {GROUP}"
    expected = reference.answers(work, 1)
    against, among = [(batched, agreement(expected, reference.answers(work, GROUP), judge))], []
    if with_vllm:
        against.append(
            ("vLLM", agreement(expected, asyncio.run(vllm_answers(folder, dtype, work)), judge))
        )
    first: list[Tokens] = []
    for path in PATHS:
        answers = path_answers(path, folder, dtype, work)
        first = first or answers
        against.append((path, agreement(expected, answers, judge)))
        if path != ours:
            among.append((path, agreement(first, answers, judge)))
        print(
            f"{dtype}: {path}",
            agreement_table(against),
            agreement_table(among),
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
    titles = (f"{dtype}, against generate() of one prompt at a time", f"{dtype}, against {ours}")
    return "\n\n".join(
        _section(title, rows) for title, rows in zip(titles, (against, among), strict=True)
    )


def _section(title: str, rows: Sequence[tuple[str, Agreement]]) -> str:
    return f"### {title}\n\n{agreement_table(rows)}"


def _requested(prompts: Sequence[list[int]], num_tokens: int) -> str:
    lengths = sorted(map(len, prompts))
    until = f"greedy, until the answer ends or has {num_tokens} tokens"
    return (
        f"- {len(prompts)} chat prompts of {lengths[0]} to {lengths[-1]} tokens, {until}; one "
        "thread"
    )


def main() -> int:
    """Run the bench; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="greedy tokens of our engine beside generate() in the same dtype"
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"]
    )
    parser.add_argument("--prompts", type=int, default=54)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--vllm", action="store_true", help="vLLM beside ours; `make bench-peers` installs it"
    )
    parser.add_argument("--log", action="store_true", help=LOG_HELP)
    options = parser.parse_args()
    if not (FOLDER / "config.json").is_file():
        print(f"bench: no model in {FOLDER}: run `make model`", file=sys.stderr)
        return 2
    if options.vllm:
        check_installed()
    load_average = os.getloadavg()[0]
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    chats = [[{"role": "user", "content": question}] for question in questions(options.prompts)]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]
    torch.set_num_threads(1)
    work = Work(prompts, options.tokens, tokenizer.eos_token_id)
    sections = []
    for dtype in options.dtype:
        sections.append(compare(FOLDER, dtype, work, with_vllm=options.vllm))
        # a run takes long, and this part of it is whole
        print(sections[-1], file=sys.stderr, flush=True)
    setting = [
        *setting_lines("bench/agreement.py", "", load_average),
        _requested(prompts, options.tokens),
    ]
    report = "\n\n".join(["\n".join(setting), DEFINITIONS, *sections])
    print(report)
    if options.log:
        keep_report(report)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StartError as e:
        sys.exit(f"bench: {e}")
