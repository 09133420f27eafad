"""A model with weights in 8 bits answers as its dequantized self does: alone, together, chunked,
from the prefix cache, prefilled remotely, over ranks, and with an adapter beside others.
"""

from pathlib import Path

import pytest

from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.server.generation.respond import cache_salt
from tests.adapters import PROJECTIONS, make_adapter
from tests.make_quantized_model import make_quantized_model
from tests.make_tiny_model import make_tiny_model
from tests.system.prompts import Prompts
from tests.worker.equality.answers import check
from tests.worker.equality.engines import Model, Pair, engines_over

LENGTHS = [1, 16, 33, 100, 200]
ENGINES = {"num_blocks": 256, "max_model_len": 512}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["int8-groups", "int8-channel", "fp8-blocks"])
def folders(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The quantized model and its dequantized self."""
    parent = tmp_path_factory.mktemp(request.param)
    return tuple(
        make_quantized_model(request.param, base, parent / str(dense), dense=dense)
        for dense in (False, True)
    )


def specs(name: str, adapter: str = "") -> list[RequestSpec]:
    source = Prompts("quantized weights")
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
            adapter=adapter if at % 2 == 0 else "",
            cache_salt=cache_salt(b"", None, shared=True, adapter=adapter if at % 2 == 0 else ""),
        )
        for at, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[list[Token]]:
    """Answers of the dequantized model, one request after another."""
    model = Model(folders[1])
    pair = Pair(*engines_over([model, model], **ENGINES))
    answers = [pair.run([spec], remote=False)[0] for spec in specs("dense")]
    model.runner.close()
    return answers


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_tokens_whatever_path_a_request_takes(folders, expected, ranks) -> None:
    models = [Model(folders[0], tensor_parallel_size=size) for size in (1, ranks)]
    pair = Pair(*engines_over(models, **ENGINES))
    try:
        for at, spec in enumerate(specs("alone")):
            check(pair.run([spec], remote=False), [expected[at]])
        check(pair.run(specs("together"), remote=False), expected)
        check(pair.run(specs("remote"), remote=True), expected)
        assert len(pair.done) == len(LENGTHS)
    finally:
        for model in models:
            model.runner.close()


def test_an_adapter_stands_on_quantized_weights(folders, tmp_path) -> None:
    """In one step with requests of the model alone."""
    make_adapter(folders[1], tmp_path / "sql", targets=PROJECTIONS)
    answers = []
    for folder in folders:
        model = Model(folder, adapters={"sql": str(tmp_path / "sql")})
        pair = Pair(*engines_over([model, model], **ENGINES))
        answers.append(pair.run(specs("adapted", "sql"), remote=False))
        model.runner.close()
    check(answers[0], answers[1])
