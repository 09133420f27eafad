"""Answers of LoRA adapters are those of the model with their weights added, whatever path a request
takes and whatever is in its steps; no adapter meets KV of another.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_worker.config.engine import EngineConfig, KvTierConfig
from pdcluster_worker.messages.engine import RequestFailed, Submit
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.processes.engine_process import open_kv_tiers
from pdcluster_worker.server.generation.respond import cache_salt
from tests.adapters import PROJECTIONS, make_adapter
from tests.make_tiny_model import make_tiny_model
from tests.reference import Reference
from tests.system.prompts import Prompts
from tests.worker.equality.answers import check
from tests.worker.equality.engines import Engine, Guesses, LocalWiring, Model, Pair, engines_over

BASE = ""
ADAPTERS = {
    "sql": {"seed": 1},
    "fr": {"seed": 2, "rank": 20, "targets": PROJECTIONS},
    "poet": {"seed": 3, "rank": 3, "alpha": 12, "targets": ("o_proj", "down_proj", "k_proj")},
    "law": {"seed": 4, "alpha": 24, "use_rslora": True, "targets": ("gate_proj", "up_proj")},
}
NAMES = [BASE, *ADAPTERS]
LENGTHS = [1, 15, 16, 33, 64, 100, 130]
NUM_TOKENS = 12


class Waiting(LocalWiring):
    def wait(self) -> None:
        time.sleep(0.001)  # for a thread that copies


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with the weights of each adapter added, by its name, beside the adapters."""
    home = tmp_path_factory.mktemp("adapters")
    found = {BASE: make_tiny_model("llama", tmp_path_factory.mktemp("llama"))}
    for name, settings in ADAPTERS.items():
        found[name] = home / f"{name}-merged"
        make_adapter(found[BASE], home / name, merged=found[name], **settings)
    return found


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Reference]:
    return {name: Reference(folder) for name, folder in folders.items()}


def adapted(folders: dict[str, Path], **settings: int) -> Model:
    home = folders["sql"].parent
    adapters = {name: str(home / name) for name in ADAPTERS}
    return Model(folders[BASE], adapters=adapters, max_batched_tokens=512, **settings)


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> Iterator[list[Model]]:
    made = [adapted(folders) for _ in range(2)]
    yield made
    for model in made:
        model.runner.close()


def specs(run: str, names: list[str] = NAMES) -> list[RequestSpec]:
    """The same prompts for the model and each adapter in turns."""
    source, made = Prompts("adapters"), []
    for prompt in [source(length) for length in LENGTHS]:
        made += [
            RequestSpec(
                f"{run}-{len(made) + at}",
                prompt,
                SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True),
                adapter=name,
                cache_salt=cache_salt(b"", None, shared=True, adapter=name),
            )
            for at, name in enumerate(names)
        ]
    return made


@pytest.fixture(scope="module")
def alone(models: list[Model]) -> list[list[Token]]:
    """Each request alone."""
    pair = Pair(*engines_over(models, max_batched_tokens=512))
    return [pair.run([spec], remote=False)[0] for spec in specs("alone")]


def test_answers_are_those_of_merged_weights(alone, references) -> None:
    for spec, answer in zip(specs("alone"), alone, strict=True):
        references[spec.adapter].check(spec.prompt, [token.token_id for token in answer])
    excused = sum(each.num_excused for each in references.values())
    assert excused <= len(alone) // 10
    tokens = {
        name: [token.token_id for answer in alone[at :: len(NAMES)] for token in answer]
        for at, name in enumerate(NAMES)
    }
    assert len({tuple(each) for each in tokens.values()}) == len(NAMES)


@pytest.mark.parametrize("budget", [32, 512])
def test_all_in_one_batch_answer_as_alone(models, alone, budget) -> None:
    pair = Pair(*engines_over(models, max_batched_tokens=budget))
    check(pair.run(specs("together"), remote=False), alone)


def test_remote_prefills_answer_as_local_ones(models, alone) -> None:
    pair = Pair(*engines_over(models))
    check(pair.run(specs("remote"), remote=True), alone)
    assert pair.decode.stats is not None
    assert pair.decode.stats.bytes_received > 0
    for engine in pair.engines:
        engine.core.check()


def test_no_prefix_is_shared_between_adapters(models, alone) -> None:
    pair = Pair(*engines_over(models, max_batched_tokens=512))
    longest = len(NAMES) * (len(LENGTHS) - 1)
    for run, cached in (("first", 0), ("again", (LENGTHS[-1] - 1) // 16 * 16)):
        for at, spec in enumerate(specs(run)[longest:]):
            (answer,) = pair.run([spec], remote=False)
            assert answer[0].cached_tokens == cached
            check([answer], [alone[longest + at]])


def test_preempted_requests_answer_as_alone(models, alone) -> None:
    pair = Pair(*engines_over(models, num_blocks=24))
    check(pair.run(specs("preempted"), remote=False), alone)
    assert pair.decode.stats is not None
    assert pair.decode.stats.preemptions > 0


def test_prefixes_of_adapters_come_from_a_tier(models, alone) -> None:
    tier = open_kv_tiers(
        EngineConfig(kv_tiers=(KvTierConfig(type="host", size=4 << 20),)),
        models[1].cache,
        models[1].runner,
        lambda: None,
    )
    try:
        prefill = Engine(models[0], wiring := Waiting(), "prefill")
        pair = Pair(prefill, Engine(models[1], wiring, "decode", num_blocks=40, tiers=tier))
        for run in ("first", "second"):
            for spec, right in zip(specs(run), alone, strict=True):
                check(pair.run([spec], remote=False), [right])
        assert pair.decode.stats is not None
        assert sum(each.loaded_bytes for each in pair.decode.stats.tiers) > 0
    finally:
        tier.close()


def test_drafted_tokens_are_verified_by_the_adapter(models, alone) -> None:
    pair = Pair(*engines_over(models, drafter=Guesses(alone)))
    check(pair.run(specs("drafted"), remote=False), alone)


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_have_their_parts_of_every_adapter(models, folders, alone, ranks) -> None:
    two = adapted(folders, **{ranks: 2})
    try:
        pair = Pair(*engines_over([models[0], two]))
        check(pair.run(specs("ranks"), remote=False), alone)
        check(pair.run(specs("remote-ranks"), remote=True), alone)
    finally:
        two.runner.close()


@pytest.mark.parametrize(
    ("adapter", "salt", "reason"),
    [
        (
            "law2",
            b"s" * 32,
            "adapter 'law2' is not loaded here, which has fr, law, poet, sql: give it in "
            "model.adapters",
        ),
        (
            "law",
            b"",
            "adapter 'law' has no cache_salt, without which its KV would be found for the model: "
            "send the salt of its name",
        ),
    ],
)
def test_a_request_that_would_be_answered_wrongly_is_refused(models, adapter, salt, reason) -> None:
    core = Pair(*engines_over(models)).decode.core
    sampling = SamplingParams(max_tokens=2, seed=0)
    core.handle(Submit(RequestSpec("r", [1, 2], sampling, adapter=adapter, cache_salt=salt)))
    assert RequestFailed("r", reason, is_refusal=True) in core.step()


def test_a_model_without_adapters_has_another_fingerprint(models, folders) -> None:
    base = Model(folders[BASE])
    assert models[0].info.weights == models[1].info.weights != base.info.weights
