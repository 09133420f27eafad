"""TTFT of conversations that come back, with tiers below the pool and without, on the real engine.

    bench/kv_tiers.py [--users 8] [--turns 12] [--context 6000] [--rounds 3] [--threads 2]
    bench/kv_tiers.py --handover [--url redis://127.0.0.1:6379]

The engine runs in this process, with the real model and no server.  The users take
turns, each with all of its conversation and more; the pool holds a quarter of the
conversations, so without a tier each turn is computed from its beginning.  Every
round runs all variants, and each ratio is within its round.  The last table is of
prompts that never come back: what saving costs where nothing is read.  A file is
read from the page cache where the machine has room for it.

With --handover one engine computes a prompt and another, which has never seen it,
answers it: TTFT of the second beside recompute, over a shared directory and, with
--url, a Redis or Valkey server.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from schedulers import idle_transport

if TYPE_CHECKING:
    from pdcluster_worker.engine.core import EngineCore
    from pdcluster_worker.engine.tier_ports import KVTierIO

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the fakes of the tests

MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct")
VARIANTS = ("recompute", "host", "disk")
ANSWER_TOKENS = 16
SLACK = 4
"""Bytes of a tier, in those of all conversations."""


def main() -> int:
    options = parse()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    bench = Bench(options)
    if options.handover:
        bench.handover()
        return 0
    print(
        f"{options.users} users x {options.turns} turns, {options.context} tokens at the end, "
        f"pool of {bench.num_blocks} blocks, threads {options.threads}, {bench.dtype}",
        flush=True,
    )
    turns = [bench.turns(number) for number in range(options.rounds)]
    print("| variant | TTFT p50, ms | beside recompute | hit tokens | tokens/s of all |")
    print("|---|---|---|---|---|")
    for name in VARIANTS:
        print(row(name, turns))
    costs = [bench.cost(number) for number in range(options.rounds)]
    print("| variant | tokens/s of prompts that never come back | beside none |\n|---|---|---|")
    for name in VARIANTS:
        ratios = [each[name] / each["recompute"] for each in costs]
        rates = [each[name] for each in costs]
        print(f"| {name} | {median(rates):.0f} | {spread(ratios)} |")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--context", type=int, default=6000, help="tokens of the last turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--handover", action="store_true", help="from one engine to another")
    parser.add_argument("--url", help="a server to hand over by, beside a directory")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default that of /tmp")
    return parser.parse_args()


def spread(ratios: list[float]) -> str:
    return f"{median(ratios):.3f}x [{min(ratios):.3f} - {max(ratios):.3f}]"


def row(name: str, rounds: list[dict[str, "Answers"]]) -> str:
    mine = [each[name] for each in rounds]
    ratios = [each[name].ttft_p50 / each["recompute"].ttft_p50 for each in rounds]
    ttft = median(answers.ttft_p50 for answers in mine)
    rate = median(answers.tokens_per_second for answers in mine)
    return f"| {name} | {1e3 * ttft:.0f} | {spread(ratios)} | {mine[0].num_hits} | {rate:.0f} |"


class Answers:
    """Times and tokens of one variant; of a first turn nothing can be read."""

    def __init__(self) -> None:
        self.ttfts: list[float] = []
        self.num_tokens = 0
        self.num_hits = 0
        self.seconds = 0.0
        self.tokens: list[list[int]] = []

    @property
    def ttft_p50(self) -> float:
        return median(self.ttfts)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class Bench:
    """The model, loaded once, and engines on it one after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        from pdcluster_worker.config.engine import EngineConfig
        from pdcluster_worker.config.worker import ModelConfig
        from pdcluster_worker.model.runner_loader import open_runner

        self._options = options
        self.num_blocks = options.users * options.context // 16 // 4 + 2
        self.engine = EngineConfig(
            max_batched_tokens=256,
            max_model_len=options.context + 64,
            num_blocks=self.num_blocks,
            threads=options.threads,
        )
        model = ModelConfig(name="m", path=str(MODEL), dtype="auto")
        self.runner, self.memory, info = open_runner(model, self.engine)
        self.info, self.dtype = info, info.dtype

    def turns(self, number: int) -> dict[str, Answers]:
        """Each variant once, in another order each round; answers are compared."""
        names = [*VARIANTS[number % 3 :], *VARIANTS[: number % 3]]
        answers = {
            name: self._on(name, lambda core: self._converse(core, number)) for name in names
        }
        expected = answers["recompute"].tokens
        for name in VARIANTS:
            pairs = zip(answers[name].tokens, expected, strict=True)
            same = sum(mine == theirs for mine, theirs in pairs)
            ttft = 1e3 * answers[name].ttft_p50
            print(
                f"round {number} {name}: TTFT p50 {ttft:.0f} ms, {same} of {len(expected)} answers "
                "equal",
                flush=True,
            )
        return answers

    def cost(self, number: int) -> dict[str, float]:
        names = [*VARIANTS[number % 3 :], *VARIANTS[: number % 3]]
        return {name: self._on(name, lambda core: self._strangers(core, number)) for name in names}

    def _on(self, name: str, run: Any) -> Any:
        with tempfile.TemporaryDirectory(dir=self._options.folder) as folder:
            tiers = self._tiers(name, folder)
            try:
                return run(self._core(tiers))
            finally:
                tiers.close()

    def _tiers(self, name: str, folder: str) -> "KVTierIO":
        from pdcluster_worker.config.engine import KvTierConfig
        from pdcluster_worker.engine.tier_ports import NO_TIERS
        from pdcluster_worker.kv_tiers.open import BlockFacts, open_tiers
        from pdcluster_worker.model.memory import reserve_private

        if name == "recompute":
            return NO_TIERS
        block_bytes = self.memory.block_bytes
        size = SLACK * 4 * self.num_blocks * block_bytes
        host = KvTierConfig(type="host", size=size)
        configs = {
            "host": lambda: [host],
            "disk": lambda: [KvTierConfig(type="disk", size=size, path=folder)],
            "directory": lambda: [
                host,
                KvTierConfig(type="shared", size=max(size, 1024 * block_bytes), path=folder),
            ],
            "server": lambda: [host, KvTierConfig(type="shared", url=self._options.url)],
        }
        facts = BlockFacts(self.info.weights, self.info.geometry, f"bench {os.getpid()}", False)
        reserve = partial(reserve_private, "tier")
        return open_tiers(configs[name](), self.memory, facts, reserve, lambda: None)

    def handover(self) -> None:
        """Each round has a prompt of its own, which each variant computes once."""
        names = ["recompute", "directory", *(["server"] if self._options.url else [])]
        ttfts: dict[str, list[float]] = {name: [] for name in names}
        for number in range(self._options.rounds):
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                ttfts[name].append(self._hand_over(name, number))
        print("| second engine's prefix | TTFT p50, ms | beside recompute |\n|---|---|---|")
        for name in names:
            ratios = [
                mine / base for mine, base in zip(ttfts[name], ttfts["recompute"], strict=True)
            ]
            print(f"| {name} | {1e3 * median(ttfts[name]):.0f} | {spread(ratios)} |")

    def _hand_over(self, name: str, number: int) -> float:
        """TTFT of an engine that has another's blocks in the store alone."""
        chosen = random.Random(f"{name} {number}")
        warmup, prompt = (
            [chosen.randrange(3, 40_000) for _ in range(length)]
            for length in (300, self._options.context)
        )
        with tempfile.TemporaryDirectory(dir=self._options.folder) as folder:
            tokens: list[list[int]] = []
            for side in ("first", "second"):
                tiers = self._tiers(name, folder)
                core = self._core(tiers)
                answer(core, f"{side} warm-up", warmup)  # its rates are measured
                found, ttft, num_hits = answer(core, side, prompt)
                tokens.append(found)
                settle(core)
                tiers.close()
        print(
            f"round {number} {name}: TTFT {1e3 * ttft:.0f} ms, {num_hits} of {len(prompt)} tokens "
            f"read, answers {'equal' if tokens[0] == tokens[1] else 'differ'}",
            flush=True,
        )
        return ttft

    def _core(self, tiers: "KVTierIO") -> "EngineCore":
        from pdcluster_worker.engine.core import EngineCore
        from pdcluster_worker.messages.engine_settings import EngineSettings

        settings = EngineSettings(
            block_size=16,
            num_blocks=self.num_blocks,
            max_batched_tokens=self.engine.max_batched_tokens,
            max_sequences=self.engine.max_sequences,
            max_model_len=self._options.context + 64,
        )
        clock = time.perf_counter
        return EngineCore(settings, self.runner, idle_transport(clock), clock, tiers=tiers)

    def _converse(self, core: "EngineCore", number: int) -> Answers:
        options, answers = self._options, Answers()
        chosen = random.Random(number)
        step = options.context // options.turns - ANSWER_TOKENS
        histories: list[list[int]] = [[] for _ in range(options.users)]
        started = time.perf_counter()
        for turn in range(options.turns):
            for user, history in enumerate(histories):
                history += [chosen.randrange(3, 40_000) for _ in range(step)]
                tokens, ttft, num_hits = answer(core, f"{number}-{user}-{turn}", history)
                history += tokens
                answers.tokens.append(tokens)
                answers.num_tokens += step + len(tokens)
                answers.num_hits += num_hits
                if turn:
                    answers.ttfts.append(ttft)
        answers.seconds = time.perf_counter() - started
        return answers

    def _strangers(self, core: "EngineCore", number: int) -> float:
        """Tokens a second of prompts that never come back."""
        chosen = random.Random(f"strangers {number}")
        length, num_prompts = self._options.context // 2, self._options.users * 2
        started = time.perf_counter()
        for at in range(num_prompts):
            answer(core, f"s{number}-{at}", [chosen.randrange(3, 40_000) for _ in range(length)])
        num_tokens: int = num_prompts * (length + ANSWER_TOKENS)
        return num_tokens / (time.perf_counter() - started)


def settle(core: "EngineCore") -> None:
    """Until what is new has been saved."""
    until = time.perf_counter() + 5.0
    saved = -1
    while time.perf_counter() < until:
        core.step()
        time.sleep(0.05)
        now = sum(tier.stats.saved_bytes for tier in core._tiers.tiers)
        if now == saved and not core._tiers._moves and not core._tiers._saves:
            return
        saved = now


def answer(core: "EngineCore", name: str, prompt: list[int]) -> tuple[list[int], float, int]:
    """The tokens of one request, its TTFT and its cached tokens."""
    from pdcluster_worker.messages.engine import RequestFailed, Submit, Tokens
    from pdcluster_worker.messages.requests import RequestSpec, SamplingParams

    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    started, ttft, tokens, num_hits = time.perf_counter(), 0.0, list[int](), 0
    core.handle(Submit(RequestSpec(name, list(prompt), sampling)))
    while len(tokens) < ANSWER_TOKENS:
        for output in core.step():
            if isinstance(output, RequestFailed):
                raise RuntimeError(output.message)
            if isinstance(output, Tokens):
                if not tokens:
                    ttft, num_hits = time.perf_counter() - started, output.tokens[0].cached_tokens
                tokens += [token.token_id for token in output.tokens]
        if not core.has_work and len(tokens) < ANSWER_TOKENS:
            time.sleep(0.0005)  # it reads
    return tokens, ttft, num_hits


if __name__ == "__main__":
    raise SystemExit(main())
