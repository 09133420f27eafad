"""The same tokens and the same bytes of KV whatever path a request takes, where KV blocks are
quantized: alone and chunked, together, preempted, from the prefix cache, remote, over ranks, and
from a tier on both sides of a remote prefill.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pdcluster_worker.config.engine import EngineConfig, KvCacheDtype, KvTierConfig
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.processes.engine_process import open_kv_tiers
from tests.make_tiny_model import make_tiny_model
from tests.system.prompts import Prompts
from tests.worker.equality.answers import check
from tests.worker.equality.engines import Engine, LocalWiring, Model, Pair, engines_over

LENGTHS = [1, 15, 16, 17, 33, 64, 100, 129, 200, 257]
FEW_BLOCKS = 40
ENGINES = {"num_blocks": 256, "max_model_len": 512}


class Waiting(LocalWiring):
    def wait(self) -> None:
        time.sleep(0.001)  # for a thread that copies


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["int8", "fp8_e4m3"])
def kind(request: pytest.FixtureRequest) -> KvCacheDtype:
    found: KvCacheDtype = request.param
    return found


@pytest.fixture(scope="module")
def models(folder: Path, kind: KvCacheDtype) -> Iterator[list[Model]]:
    made = [Model(folder, kv_dtype=kind, max_batched_tokens=512) for _ in range(2)]
    yield made
    for model in made:
        model.runner.close()


def specs(name: str) -> list[RequestSpec]:
    """Greedy and seeded requests in turns."""
    source = Prompts("quantized")
    drawn = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}
    return [
        RequestSpec(
            f"{name}-{at}",
            source(length),
            SamplingParams(
                max_tokens=32,
                seed=at,
                ignore_eos=True,
                logprobs=1,
                **(drawn if at % 2 else {"temperature": 0.0}),
            ),
        )
        for at, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def expected(models: list[Model]) -> list[list[Token]]:
    """Each request alone, its prompt in one step."""
    pair = Pair(*engines_over(models, max_batched_tokens=512, **ENGINES))
    return [pair.run([spec], remote=False)[0] for spec in specs("expected")]


def same_path(pair: Pair, name: str, expected: list[list[Token]], *, remote: bool = False) -> None:
    check(pair.run(specs(name), remote=remote), expected)
    for engine in pair.engines:
        engine.core.check()


def test_chunks_together_and_from_the_prefix_cache(models, expected) -> None:
    pair = Pair(*engines_over(models, max_batched_tokens=32, **ENGINES))
    same_path(pair, "chunked", expected)
    again = pair.run(specs("again"), remote=False)
    check(again, expected)
    assert again[-1][0].cached_tokens == (LENGTHS[-1] - 1) // 16 * 16


def test_preempted_requests(models, expected) -> None:
    pair = Pair(*engines_over(models, num_blocks=19, max_model_len=290))
    same_path(pair, "preempted", expected)
    assert pair.decode.stats is not None
    assert pair.decode.stats.preemptions > 0


def test_remote_prefills_move_half_the_bytes(models, folder, kind, expected) -> None:
    pair = Pair(*engines_over(models, **ENGINES))
    same_path(pair, "remote", expected, remote=True)
    plain = Pair(*engines_over([Model(folder) for _ in range(2)], **ENGINES))
    plain.run(specs("plain"), remote=True)
    moved = [each.decode.stats.bytes_received for each in (pair, plain)]
    dim = models[0].info.geometry.head_dim
    assert moved[0] / moved[1] == (dim + 4) / (4 * dim)  # of float32


def test_remote_prefills_over_two_ranks(models, folder, kind, expected) -> None:
    """Sums over ranks round in another order, so a number may round to its neighbour."""
    two = Model(folder, kv_dtype=kind, tensor_parallel_size=2)
    try:
        pair = Pair(*engines_over([two, models[1]], **ENGINES))
        answers = pair.run(specs("ranks"), remote=True)
        tokens = [
            [token.token_id for token in answer] == [token.token_id for token in right]
            for answer, right in zip(answers, expected, strict=True)
        ]
        assert sum(tokens) >= len(tokens) - 1
    finally:
        two.runner.close()


def test_bytes_of_a_prompt_are_the_same_however_it_is_cut(models) -> None:
    """In one step, and in chunks beside others: of all blocks that are found by a hash."""
    found = []
    for name, budget, at_once in (("whole", 512, 1), ("cut", 32, len(LENGTHS))):
        pair = Pair(*engines_over(models, max_batched_tokens=budget, **ENGINES))
        made = specs(name)
        for start in range(0, len(made), at_once):
            pair.run(made[start : start + at_once], remote=False)
        hashes = pair.decode.core.pool.prefix_cache._hashes
        memory = models[1].cache
        found.append({key: bytes(memory.block(block)) for block, key in hashes.items()})
    assert len(found[0]) > 40
    assert found[0] == found[1]


def test_prefixes_from_tiers(models, kind, expected, tmp_path) -> None:
    configs = (
        KvTierConfig(type="host", size=256 << 10),
        KvTierConfig(type="disk", size=16 << 20, path=str(tmp_path)),
    )
    with ExitStack() as ends:
        tiers = [
            open_kv_tiers(EngineConfig(kv_tiers=configs), each.cache, each.runner, lambda: None)
            for each in models
        ]
        for tier in tiers:
            ends.callback(tier.close)
        wiring = Waiting()
        pair = Pair(
            *(
                Engine(model, wiring, f"tier-{at}", num_blocks=FEW_BLOCKS, tiers=tier)
                for at, (model, tier) in enumerate(zip(models, tiers, strict=True))
            )
        )
        for name in ("first", "again", "third"):
            for spec, right in zip(specs(name), expected, strict=True):
                check(pair.run([spec], remote=name == "third"), [right])
        assert pair.decode.stats is not None
        assert sum(tier.loaded_bytes for tier in pair.decode.stats.tiers) > 0


def test_memory_of_a_pool_holds_twice_the_blocks(folder, kind) -> None:
    blocks = []
    for each in ("bf16", kind):
        model = Model(folder, kv_dtype=each, dtype="bfloat16")
        blocks.append(model.cache.block_bytes)
        model.runner.close()
    dim = model.info.geometry.head_dim
    assert blocks[1] / blocks[0] == (dim + 4) / (2 * dim)
