"""The same tokens whatever ranks compute them: tensor parallel, pipeline parallel and one rank, on every path.

The engines' other ranks are real processes that talk by gloo; KV blocks move
between engines of unequal sizes, bytes and checksums compared.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_worker.engine.messages import RequestSpec, Sampling, Token
from pdcluster_worker.transfer.local import LocalFabric
from tests.make_tiny_model import make_tiny_model
from tests.system.prompts import Prompts
from tests.worker.equality.engines import Engine, Pair

LENGTHS = (1, 15, 16, 17, 33, 63, 64, 65, 130, 200)  # blocks are 16, chunks 64
NUM_TOKENS = 18
SIZES = {"one": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}
Engines = dict[str, Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[Engines]:
    fabric = LocalFabric()
    sizes = {name: {"tensor_parallel_size": tp, "pipeline_parallel_size": pp} for name, (tp, pp) in SIZES.items()}
    made = {name: Engine(folder, fabric, name, **size) for name, size in sizes.items()}
    yield made
    for engine in made.values():
        engine.runner.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = Prompts("over ranks")
    return [source(length) for length in LENGTHS]


def specs(prompts: list[list[int]], case: str) -> list[RequestSpec]:
    """Greedy and seeded requests in turns; a case's cached blocks are its own."""
    salt = case.encode().ljust(32, b"-")
    found = []
    for index, prompt in enumerate(prompts):
        sampling = Sampling(
            max_tokens=NUM_TOKENS,
            seed=index,
            temperature=0.8 * (index % 2),
            ignore_eos=True,
            logprobs=1,
        )
        found.append(RequestSpec(f"{case}-{index}", prompt, sampling, cache_salt=salt))
    return found


@pytest.fixture(scope="module")
def expected(engines: Engines, prompts: list[list[int]]) -> list[list[Token]]:
    return Pair(engines["one"], engines["one"]).run(specs(prompts, "expected"), remote=False)


def check(actual: list[list[Token]], expected: list[list[Token]]) -> None:
    assert [[token.token_id for token in answer] for answer in actual] == [[token.token_id for token in answer] for answer in expected]
    for mine, theirs in zip(actual, expected, strict=True):
        assert [token.logprob for token in mine] == pytest.approx([token.logprob for token in theirs], abs=1e-3)


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_local_tokens_equal_those_of_one_rank(name: str, engines: Engines, prompts: list[list[int]], expected: list[list[Token]]) -> None:
    """Together, so that decodes and chunks share steps and micro-batches."""
    pair = Pair(engines[name], engines[name])
    check(pair.run(specs(prompts, f"local {name}"), remote=False), expected)
    again = pair.run(
        [RequestSpec(f"again-{spec.request_id}", *spec_rest(spec)) for spec in specs(prompts, f"local {name}")],
        remote=False,
    )
    check(again, expected)
    assert [answer[0].cached_tokens for answer in again] == [(length - 1) // 16 * 16 for length in LENGTHS]
    engines[name].core.check()


def spec_rest(spec: RequestSpec) -> tuple[list[int], Sampling, list[int], int, bytes]:
    return spec.prompt, spec.sampling, spec.output, spec.priority, spec.cache_salt


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("tp2", "one"), ("one", "tp2"), ("pp2", "one"), ("one", "pp2"), ("tp2", "pp2")],
)
def test_remote_tokens_equal_between_engines_of_unequal_ranks(
    prefill: str,
    decode: str,
    engines: Engines,
    prompts: list[list[int]],
    expected: list[list[Token]],
) -> None:
    pair = Pair(engines[prefill], engines[decode])
    check(pair.run(specs(prompts, f"{prefill} to {decode}"), remote=True), expected)
    for engine in (engines[prefill], engines[decode]):
        engine.core.check()
        assert engine.core.pool.counts()["quarantined"] == 0
