"""Models whose layers have experts answer the same on every path: alone, together, chunked, from
the prefix cache, prefilled remotely, and with experts divided over ranks.
"""

from pathlib import Path

import pytest

from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.server.generation.respond import cache_salt
from tests.adapters import make_adapter
from tests.make_tiny_model import make_tiny_model
from tests.system.prompts import Prompts
from tests.worker.equality.answers import check
from tests.worker.equality.engines import Model, Pair, engines_over

LENGTHS = [1, 16, 33, 100, 200]
ENGINES = {"num_blocks": 256, "max_model_len": 512}
KINDS = ["mixtral", "qwen3-moe", "gpt-oss"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def specs(name: str, adapter: str = "") -> list[RequestSpec]:
    """Every second request is of the adapter, the others are drawn."""
    source = Prompts("experts")
    drawn = {"temperature": 0.8, "top_p": 0.9}
    return [
        RequestSpec(
            f"{name}-{at}",
            source(length),
            SamplingParams(
                max_tokens=24,
                seed=at,
                ignore_eos=True,
                logprobs=1,
                **(drawn if at % 2 else {"temperature": 0.0}),
            ),
            adapter="" if at % 2 else adapter,
            cache_salt=cache_salt(b"", None, shared=True, adapter="" if at % 2 else adapter),
        )
        for at, length in enumerate(LENGTHS)
    ]


def answers_alone(model: Model, requests: list[RequestSpec]) -> list[list[Token]]:
    pair = Pair(*engines_over([model, model], **ENGINES))
    return [pair.run([spec], remote=False)[0] for spec in requests]


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_the_same_tokens_whatever_path_a_request_takes(folder: Path, sizes: dict[str, int]) -> None:
    models = [Model(folder), Model(folder, **sizes)]
    pair = Pair(*engines_over(models, **ENGINES))
    try:
        expected = answers_alone(models[0], specs("alone"))
        for at, spec in enumerate(specs("one")):
            check(pair.run([spec], remote=False), [expected[at]])
        check(pair.run(specs("together"), remote=False), expected)
        check(pair.run(specs("remote"), remote=True), expected)
        assert len(pair.done) == len(LENGTHS)
    finally:
        for model in models:
            model.runner.close()


def test_an_adapter_of_attention_stands_before_experts(folder: Path, tmp_path: Path) -> None:
    """In one step with requests of the model alone: as the model with the weights added."""
    make_adapter(folder, tmp_path / "sql", merged=tmp_path / "merged")
    adapted = Model(folder, adapters={"sql": str(tmp_path / "sql")})
    merged = Model(tmp_path / "merged")
    try:
        pair = Pair(*engines_over([adapted, adapted], **ENGINES))
        found = pair.run(specs("adapted", "sql"), remote=False)
        expected = answers_alone(merged, specs("merged"))
        check(found[::2], expected[::2])
        check(found[1::2], answers_alone(adapted, specs("base"))[1::2])
    finally:
        for model in (adapted, merged):
            model.runner.close()
