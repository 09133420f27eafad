"""T6, the first promise of docs/architecture.md: the same tokens whatever path a request takes.

54 prompts around block, chunk and threshold edges, over {mixed, local, remote,
preempted, prefix-hit} x {alone, together}: greedy answers against transformers'
generate(), and seeded answers with penalties and logprobs against one another.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from tests.make_tiny_model import make_tiny_model
from tests.reference import Reference
from tests.system.prompts import Prompts
from tests.worker.equality.engines import Model, Pair, engines_over

NUM_TOKENS = 18  # more than a block, so that every request grows
EDGES = (16, 32, 48, 64, 128, 192, 256, 320)  # blocks are 16, chunks 64, the offload threshold 256
LENGTHS = sorted(
    {1, 2, 3, 5, 8, *(edge + delta for edge in EDGES for delta in (-2, -1, 0, 1, 2, 7))}
)
GROUP = 18

PATHS = ["mixed", "local", "remote", "preempted", "prefix-hit", "prefix-hit-remote"]
# A lone request is never preempted.
CELLS = [
    (path, together)
    for path in PATHS
    for together in (False, True)
    if together or path != "preempted"
]


def greedy(_: int) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True)


def seeded(index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        seed=1000 + index,
        temperature=0.8,
        top_p=0.95,
        top_k=40,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={7: 1.5},
        logprobs=3,
        ignore_eos=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = Prompts("every path")
    return [source(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def models(folder: Path) -> list[Model]:
    return [Model(folder, max_batched_tokens=2048) for _ in range(2)]


def pair_of(path: str, models: list[Model]) -> Pair:
    """mixed computes whole prompts in one step; the others in chunks; preempted has room for a few
    requests only.
    """
    match path:
        case "mixed":
            return Pair(*engines_over(models, max_batched_tokens=2048))
        case "preempted":
            return Pair(*engines_over(models, num_blocks=24))
        case _:
            return Pair(*engines_over(models))


def answer_all(
    path: str,
    models: list[Model],
    prompts: list[list[int]],
    sampling: Callable[[int], SamplingParams],
    *,
    together: bool,
) -> list[list[Token]]:
    pair = pair_of(path, models)
    remote = path.endswith("remote")
    size = GROUP if together else 1
    answers: list[list[Token]] = []
    for start in range(0, len(prompts), size):
        specs = [
            RequestSpec(f"r{index}", prompt, sampling(index))
            for index, prompt in enumerate(prompts[start : start + size], start)
        ]
        if path.startswith("prefix-hit"):
            warm = [
                RequestSpec(f"warm-{spec.request_id}", spec.prompt, greedy(0)) for spec in specs
            ]
            pair.run(warm, remote=False)
        answers += pair.run(specs, remote=remote)
    check_took_the_path(path, pair, answers, together=together)
    return answers


def check_took_the_path(
    path: str, pair: Pair, answers: list[list[Token]], *, together: bool
) -> None:
    """A test of a path that was not taken would prove nothing."""
    for engine in (pair.decode, pair.prefill):
        engine.core.check()
        counts = engine.core.pool.counts()
        assert counts["in_use"] == counts["receiving"] == counts["quarantined"] == 0
    stats = pair.decode.stats
    assert stats is not None
    assert (stats.bytes_received > 0) == path.endswith("remote")
    if path == "preempted" and together:
        assert stats.preemptions > 0
    if path == "prefix-hit":
        expected = [(length - 1) // 16 * 16 for length in LENGTHS]
        assert [answer[0].cached_tokens for answer in answers] == expected


def cells(*left_out: tuple[str, bool]) -> pytest.MarkDecorator:
    chosen = [cell for cell in CELLS if cell not in left_out]
    return pytest.mark.parametrize(
        ("path", "together"),
        chosen,
        ids=[f"{path}-{'together' if both else 'alone'}" for path, both in chosen],
    )


@cells()
def test_greedy_tokens_equal_generate(
    path: str, together: bool, models: list[Model], reference: Reference, prompts: list[list[int]]
) -> None:
    answers = answer_all(path, models, prompts, greedy, together=together)

    assert len(answers) == len(LENGTHS) >= 50
    for prompt, answer in zip(prompts, answers, strict=True):
        reference.check(prompt, [token.token_id for token in answer])
    assert reference.num_excused <= len(LENGTHS) // 10, (
        "near ties are rare; this many hide something"
    )


@pytest.fixture(scope="module")
def seeded_alone(models: list[Model], prompts: list[list[int]]) -> list[list[Token]]:
    return answer_all("mixed", models, prompts, seeded, together=False)


@cells(("mixed", False))  # which the others are compared with
def test_seeded_tokens_and_logprobs_equal_on_every_path(
    path: str,
    together: bool,
    models: list[Model],
    prompts: list[list[int]],
    seeded_alone: list[list[Token]],
) -> None:
    answers = answer_all(path, models, prompts, seeded, together=together)

    for expected, actual in zip(seeded_alone, answers, strict=True):
        assert [token.token_id for token in actual] == [token.token_id for token in expected]
        assert [token.logprob for token in actual] == pytest.approx(
            [token.logprob for token in expected], abs=1e-3
        )
        assert [len(token.top_logprobs) for token in actual] == [3] * NUM_TOKENS
