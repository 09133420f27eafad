"""The same tokens where the prefix of a prompt comes from a tier below the pool, itself a third of
what all prompts need; on both sides of a remote prefill.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pdcluster_worker.config.engine import EngineConfig, KvTierConfig
from pdcluster_worker.engine.tier_ports import KVTierIO
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.processes.engine_process import open_kv_tiers
from tests.system.prompts import Prompts
from tests.worker.equality.answers import check
from tests.worker.equality.engines import Engine, LocalWiring, Model, Pair

NUM_BLOCKS = 48  # of 16 tokens
LENGTHS = [33, 47, 64, 65, 100, 129, 160, 200, 255, 256, 257, 300, 320, 321]
BLOCKS_OF_ALL = sum(LENGTHS) // 16
SIZES = {
    "host": [KvTierConfig(type="host", size=16 << 20)],
    "disk": [KvTierConfig(type="disk", size=16 << 20, path="DISK")],
    "both": [
        KvTierConfig(type="host", size=1 << 20),
        KvTierConfig(type="disk", size=16 << 20, path="DISK"),
    ],
    "shared": [
        KvTierConfig(type="host", size=1 << 20),
        KvTierConfig(type="shared", size=64 << 20, path="DISK"),
    ],
}


class Waiting(LocalWiring):
    def wait(self) -> None:
        time.sleep(0.001)  # for a thread that copies


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = Prompts("tiers")
    return [source(length) for length in LENGTHS]


@contextmanager
def tiers_of(model: Model, kind: str, folder: Path) -> Iterator[KVTierIO]:
    configs = tuple(
        KvTierConfig(type=each.type, size=each.size, path=each.path and str(folder))
        for each in SIZES[kind]
    )
    engine = EngineConfig(kv_tiers=configs)
    tiers = open_kv_tiers(engine, model.cache, model.runner, lambda: None)
    try:
        yield tiers
    finally:
        tiers.close()


def specs_of(prompts: list[list[int]], name: str) -> list[RequestSpec]:
    sampling = SamplingParams(
        max_tokens=6, seed=7, temperature=0.8, top_p=0.9, logprobs=1, ignore_eos=True
    )
    return [RequestSpec(f"{name}{at}", prompt, sampling) for at, prompt in enumerate(prompts)]


def run_each(
    pair: Pair, specs: list[RequestSpec], *, remote: bool, at_once: int = 1
) -> list[list[Token]]:
    answers: list[list[Token]] = []
    for start in range(0, len(specs), at_once):
        answers += pair.run(specs[start : start + at_once], remote=remote)
    return answers


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize(
    ("kind", "ranks"), [("host", 1), ("disk", 1), ("both", 1), ("shared", 1), ("host", 2)]
)
def test_answers_over_a_tier(tiny_folder, tmp_path, prompts, kind, ranks, remote, together) -> None:
    assert BLOCKS_OF_ALL > 3 * NUM_BLOCKS
    folder = tiny_folder("llama")
    models = [Model(folder, num_blocks=NUM_BLOCKS, tensor_parallel_size=ranks) for _ in range(2)]
    with ExitStack() as ends:
        for model in models:
            ends.callback(model.runner.close)
        wiring = Waiting()
        plain = Pair(
            *(Engine(m, wiring, f"plain-{n}", num_blocks=NUM_BLOCKS) for n, m in enumerate(models))
        )
        expected = run_each(plain, specs_of(prompts, "plain"), remote=False)
        tiers = [ends.enter_context(tiers_of(model, kind, tmp_path)) for model in models]
        engines = [
            Engine(model, wiring, str(number), num_blocks=NUM_BLOCKS, tiers=tier)
            for number, (model, tier) in enumerate(zip(models, tiers, strict=True))
        ]
        pair = Pair(*engines)
        check(run_each(pair, specs_of(prompts, "first"), remote=remote), expected)
        again = specs_of(prompts, "again")
        # a pool holds two of the longest, and would refuse more that are prefilled remotely
        at_once = (2 if remote else len(again)) if together else 1
        answers = run_each(pair, again, remote=remote, at_once=at_once)

        check(answers, expected)
        for engine in engines:
            engine.core.check()
        stats = pair.decode.stats
        assert stats is not None
        assert stats.tier_reads["read"] + stats.tier_reads["slow"] > 0
        assert sum(tier.loaded_bytes for tier in stats.tiers) > 0
        if not together:
            assert max(answer[0].cached_tokens for answer in answers) > 100


def test_a_model_of_windows_alone_takes_no_tiers(tiny_folder) -> None:
    model = Model(tiny_folder("mistral-window"), num_blocks=NUM_BLOCKS)
    engine = EngineConfig(kv_tiers=tuple(SIZES["host"]))
    with pytest.raises(ModelError, match=r"needs whole prefixes, and every layer .* leave it out"):
        open_kv_tiers(engine, model.cache, model.runner, lambda: None)
