"""A draft model beside the engine's: the same vocabulary, its share of the memory, and the same
answers.
"""

import json
import time
from pathlib import Path

import pytest

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import ModelConfig
from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.engine.drafters import ModelDrafter, NgramDrafter
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.engine import EngineStats, Submit, Tokens
from pdcluster_worker.messages.engine_settings import EngineSettings, SpeculationSettings
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdcluster_worker.model.drafter_loader import (
    check_vocabulary,
    divide,
    make_drafter,
    open_draft_runner,
    token_values,
)
from pdcluster_worker.model.runner_loader import open_runner
from tests.make_quantized_model import make_quantized_model
from tests.make_tiny_model import make_tiny_model
from tests.worker.fake_network import FakeNetwork, FakeTransport

TOKENS = {"a": 0, "b": 1, "c": 2}


def folder(
    path: Path,
    vocab: object = TOKENS,
    added: tuple[tuple[str, int], ...] = (("<end>", 3),),
    **config: int,
) -> Path:
    path.mkdir()
    entries = [{"content": content, "id": token_id} for content, token_id in added]
    (path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": vocab}, "added_tokens": entries})
    )
    sizes = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 256,
    } | config
    (path / "config.json").write_text(json.dumps(sizes))
    return path


def test_vocabularies_must_be_the_same(tmp_path: Path) -> None:
    model = folder(tmp_path / "model")
    check_vocabulary(model, folder(tmp_path / "same", [["a", -1.0], ["b", -2.0], ["c", -3.0]]))
    with pytest.raises(
        ModelError,
        match=r"draftModel: .*another vocabulary than the model: token 1 is 'c' there and 'b' "
        r"here: take",
    ):
        check_vocabulary(model, folder(tmp_path / "other", {"a": 0, "c": 1, "b": 2}))
    with pytest.raises(ModelError, match="token 3 is None there and '<end>' here"):
        check_vocabulary(model, folder(tmp_path / "fewer", added=()))
    with pytest.raises(ModelError, match=r"no vocabulary that can be compared"):
        check_vocabulary(model, folder(tmp_path / "strange", 7))
    with pytest.raises(ModelError, match=r"draftModel: .*missing/tokenizer\.json cannot be read"):
        check_vocabulary(model, tmp_path / "missing")


def test_memory_for_blocks_is_divided_by_what_a_token_takes(tmp_path: Path) -> None:
    model, draft = (
        folder(tmp_path / "model", num_hidden_layers=6),
        folder(tmp_path / "draft", num_hidden_layers=2),
    )
    assert (token_values(model), token_values(draft)) == (6 * 2 * 32, 2 * 2 * 32)
    drafts = SpeculationSettings(method="draft", draft_model=str(draft))
    engine = EngineConfig(
        kv_cache_memory=8000,
        tensor_parallel_size=2,
        threads=2,
        max_model_len=99,
        speculation=drafts,
    )
    division = divide(ModelConfig("m", str(model)), engine)
    assert division.draft is not None
    assert (division.engine.kv_cache_memory, division.draft.kv_cache_memory) == (6000, 2000)
    assert (
        division.draft.tensor_parallel_size,
        division.draft.threads,
        division.draft.max_model_len,
    ) == (1, 1, None)
    assert division.draft.speculation is None
    plain = EngineConfig(speculation=SpeculationSettings())
    assert divide(ModelConfig("m", "/nowhere"), plain).draft is None
    (draft / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="does not say the size of its KV cache"):
        divide(ModelConfig("m", str(model)), engine)


def test_drafts_of_a_model_are_right_and_the_answers_the_same(tmp_path: Path) -> None:
    """The draft model is the model itself: greedy and drawn tokens agree, so that all drafts are
    right.
    """
    path = make_tiny_model("llama", tmp_path / "llama")
    if not (path / "tokenizer.json").exists():
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": TOKENS}}))
    drafts = SpeculationSettings(method="draft", draft_model=str(path), adaptive=False)
    engine = EngineConfig(num_blocks=64, threads=1, max_sequences=8, speculation=drafts)
    model = ModelConfig("tiny", str(path), "float32")
    division = divide(model, engine)
    opened = open_draft_runner(model, division, "cpu")
    runner, cache, info = open_runner(model, division.engine)
    drafter = make_drafter(engine, opened, info)
    assert isinstance(drafter, ModelDrafter)
    answers = []
    for own in (None, drafter):
        settings = EngineSettings(
            16, 64, 256, 8, info.max_model_len, speculation=None if own is None else drafts
        )
        core = EngineCore(
            settings,
            runner,
            FakeTransport(FakeNetwork(), cache, "e", time.monotonic),
            time.monotonic,
            drafter=own,
        )
        for number, temperature in enumerate((0.0, 0.9)):
            sampling = SamplingParams(
                max_tokens=12,
                seed=5,
                temperature=temperature,
                ignore_eos=True,
                presence_penalty=0.3 * number,
            )
            core.handle(Submit(RequestSpec(f"r{number}", list(range(5 + number, 25)), sampling)))
        found: dict[str, list[int]] = {}
        while core.has_work:
            for output in core.step():
                if isinstance(output, Tokens):
                    for token in output.tokens:
                        found.setdefault(token.request_id, []).append(token.token_id)
                elif isinstance(output, EngineStats):
                    stats = output
        answers.append(found)
    assert answers[0] == answers[1]
    assert sum(stats.accepted) == sum(stats.drafted) > 12
    assert drafter.pool.counts()["free"] == 64


def test_draft_model_is_opened_for_the_short_length_of_its_engine(tmp_path: Path) -> None:
    path = make_tiny_model("llama", tmp_path / "llama")
    if not (path / "tokenizer.json").exists():
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": TOKENS}}))
    drafts = SpeculationSettings(method="draft", draft_model=str(path))
    engine = EngineConfig(num_blocks=4, max_model_len=48, threads=1, speculation=drafts)
    model = ModelConfig("tiny", str(path), "float32")
    opened = open_draft_runner(model, divide(model, engine), "cpu")
    assert opened is not None
    assert (opened[0].info.max_model_len, opened[1]) == (48, 4)


@pytest.mark.parametrize(("kind", "precision"), [(None, "float32"), ("int8-channel", "int8")])
def test_draft_model_has_the_precision_of_its_checkpoint(
    kind: str | None, precision: str, tmp_path: Path
) -> None:
    """engine.quantization is for the model: a draft may be quantized already."""
    path = make_tiny_model("llama", tmp_path / "llama")
    if not (path / "tokenizer.json").exists():
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": TOKENS}}))
    draft = path if kind is None else make_quantized_model(kind, path, tmp_path / "draft")
    drafts = SpeculationSettings(method="draft", draft_model=str(draft))
    engine = EngineConfig(num_blocks=8, threads=1, quantization="fp8_e4m3", speculation=drafts)
    model = ModelConfig("tiny", str(path), "float32")
    division = divide(model, engine)
    opened = open_draft_runner(model, division, "cpu")
    assert opened is not None
    assert opened[0].info.precision == precision
    assert division.engine.quantization == "fp8_e4m3"


def test_ngram_is_the_drafter_without_a_model_and_nothing_when_off() -> None:
    info = open_draft_runner(
        ModelConfig("m", "/m"), divide(ModelConfig("m", "/m"), EngineConfig()), "cpu"
    )
    assert info is None
    assert make_drafter(EngineConfig(), None, None) is None
    assert isinstance(
        make_drafter(EngineConfig(speculation=SpeculationSettings()), None, None), NgramDrafter
    )
