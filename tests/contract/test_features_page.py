"""docs/models.md: each cell of its features by engine and device follows from what validation takes
and from what was run.

A cell is refused where an object with the feature is; else it says where the feature was run, and
then a test, or a part of scripts/gpu_run.py, that runs it is named here; else it is not run.
"""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse
from tests.schema.object_cases import Change, at, both, minimal, no_change, sglang, vllm

ROOT = Path(__file__).parents[2]
CPU, GPU = "cpu", "H200"
ENGINES = {"pdcluster": no_change, "vllm": vllm(), "sglang": sglang()}
PLACES = [(engine, device) for engine in ENGINES for device in (CPU, GPU)]
SYSTEM = "tests/system/test_"
STOCK = f"{SYSTEM}stock_"
MIXED = ("mixed",)


@dataclass(frozen=True)
class Feature:
    """name: as in the table.  fields: of `spec`, for all engines or for some.

    run: what runs it, by engine, on CPUs; on_gpu: of our own engine, on an H200.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    run: dict[str, str] = field(default_factory=dict)
    on_gpu: str = ""
    of_engine: dict[str, dict[str, Any]] = field(default_factory=dict)
    roles: tuple[str, ...] = ("prefill", "decode")


def of_engine(name: str, value: Any) -> dict[str, Any]:
    return {f"engine.{name}": value}


PODS = {"name": "cpu", "replicas": 1, "podsPerReplica": 2}
DRAFTS = {"method": "ngram", "numTokens": 3}
SPECULATIVE = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']

FEATURES = (
    Feature(
        "roles `prefill` and `decode`",
        run={
            "pdcluster": f"{SYSTEM}prefill_paths.py::"
            "test_forced_remote_moves_what_the_prompt_implies",
            "vllm": f"{STOCK}vllm.py::test_remote_prefill_gives_the_tokens_of_a_local_one",
        },
        on_gpu="servers",
    ),
    Feature(
        "role `mixed`",
        run={
            "pdcluster": f"{SYSTEM}prefill_paths.py::test_mixed_worker_does_both_phases",
            "vllm": f"{STOCK}front_end.py::test_completions_are_echoed",
            "sglang": f"{STOCK}sglang.py::test_its_tokens_are_those_of_the_model",
        },
        roles=MIXED,
    ),
    Feature(
        "tokens as of the model's own code",
        run={
            "pdcluster": f"{SYSTEM}equality_over_http.py::test_greedy_tokens_equal_transformers",
            "vllm": f"{STOCK}vllm.py::test_remote_prefill_gives_the_tokens_of_a_local_one",
            "sglang": f"{STOCK}sglang.py::test_its_tokens_are_those_of_the_model",
        },
        on_gpu="tokens",
        roles=MIXED,
    ),
    Feature(
        "prefix cache, `engine.prefixCaching`",
        fields=of_engine("prefixCaching", True),
        run={
            "pdcluster": f"{SYSTEM}given_prefixes.py::"
            "test_next_turn_of_a_chat_is_not_computed_again",
            "vllm": f"{STOCK}vllm.py::test_the_second_turn_hits_the_prefix_cache",
            "sglang": f"{STOCK}sglang.py::"
            "test_the_second_turn_hits_the_prefix_cache_and_the_index_knows_it",
        },
        roles=MIXED,
    ),
    Feature(
        "structured output",
        run={
            "pdcluster": f"{SYSTEM}equality_over_http.py::"
            "test_constrained_answers_are_the_same_on_every_path",
            "vllm": f"{STOCK}front_end.py::test_a_forced_call_has_its_form",
        },
        roles=MIXED,
    ),
    Feature(
        "tools",
        run={
            "pdcluster": f"{SYSTEM}tools_on_every_path.py::test_calls_are_the_same_on_every_path",
            "vllm": f"{STOCK}front_end.py::test_a_forced_call_has_its_form",
        },
        roles=MIXED,
    ),
    Feature(
        "images, `model.frontend: engine`",
        fields={"model.frontend": "engine"},
        run={"vllm": f"{STOCK}images.py::test_a_mixed_worker_answers_as_vllm_does"},
        roles=MIXED,
    ),
    Feature(
        "embeddings, `model.frontend: engine`",
        fields={"model.frontend": "engine"},
        of_engine={"vllm": of_engine("args", ["--runner", "pooling"])},
        run={
            "vllm": f"{STOCK}embeddings.py::"
            "test_inputs_have_the_model_s_embeddings_by_worker_and_router"
        },
        roles=MIXED,
    ),
    Feature(
        "weights in 8 bits, as a checkpoint has them",
        run={
            "pdcluster": "tests/worker/equality/test_same_tokens_of_quantized_weights.py::"
            "test_the_same_tokens_whatever_path_a_request_takes"
        },
        roles=MIXED,
    ),
    Feature(
        "LoRA, `model.adapters`",
        fields={"model.adapters": [{"name": "poet", "path": "poet"}]},
        run={
            "pdcluster": f"{SYSTEM}adapters.py::"
            "test_adapters_answer_by_their_weights_on_every_path",
            "vllm": f"{STOCK}adapters.py::test_an_adapter_answers_by_its_weights_on_every_path",
        },
        roles=MIXED,
    ),
    Feature(
        "`engine.speculation`",
        fields=of_engine("speculation", DRAFTS),
        run={
            "pdcluster": "tests/worker/model/test_drafter_loader.py::"
            "test_drafts_of_a_model_are_right_and_the_answers_the_same"
        },
        roles=MIXED,
    ),
    Feature("speculation by `engine.args`", of_engine("args", SPECULATIVE), roles=MIXED),
    Feature(
        "several ranks, `engine.tensorParallelSize`",
        of_engine("tensorParallelSize", 2),
        run={
            "pdcluster": f"{SYSTEM}unequal_ranks.py::"
            "test_remote_prefill_between_unequal_ranks_gives_the_same_tokens",
            "vllm": f"{STOCK}tensor_parallel.py::"
            "test_two_prefill_ranks_fill_the_blocks_of_one_decode_rank",
        },
        roles=MIXED,
    ),
    Feature(
        "stages, `engine.pipelineParallelSize`",
        of_engine("pipelineParallelSize", 2),
        run={
            "pdcluster": "tests/worker/equality/test_same_tokens_matrix.py::"
            "test_blocks_move_between_tensor_parallel_ranks_and_stages"
        },
        roles=MIXED,
    ),
    Feature(
        "several engines, `engine.dataParallelSize`",
        of_engine("dataParallelSize", 2),
        run={
            "pdcluster": f"{SYSTEM}two_engines.py::test_tokens_of_two_engines_are_those_of_one",
            "vllm": f"{STOCK}ranks.py::"
            "test_both_ranks_on_both_sides_answer_and_give_the_model_s_tokens",
        },
        roles=MIXED,
    ),
    Feature(
        "workers of several pods, `podsPerReplica`",
        {"roles.mixed.pools": [PODS]},
        of_engine={
            "pdcluster": of_engine("dataParallelSize", 2),
            "vllm": of_engine("tensorParallelSize", 2),
            "sglang": of_engine("tensorParallelSize", 2),
        },
        run={
            "pdcluster": f"{SYSTEM}headless.py::test_headless_engine_serves_and_its_end_is_its_own",
            "vllm": f"{STOCK}tensor_parallel.py::"
            "test_ranks_of_two_pods_serve_end_and_start_again_together",
        },
        roles=MIXED,
    ),
    Feature(
        "the same bits in every batch, `engine.batchInvariant`",
        of_engine("batchInvariant", True),
        run={
            "pdcluster": "tests/worker/model/test_batch_invariance.py::"
            "test_a_row_has_the_same_bits_on_every_path"
        },
        roles=MIXED,
    ),
    Feature(
        "KV in host memory, `engine.kvTransfer.offload`",
        of_engine("kvTransfer", {"offload": {"memory": "2Gi"}}),
        roles=MIXED,
    ),
)


def document_of(feature: Feature, engine: str, device: str) -> dict[str, Any]:
    pool = {"name": "cpu", "replicas": 1}
    changes: list[Change] = [
        at("spec.roles", {role: {"pools": [pool]} for role in feature.roles}),
        ENGINES[engine],
    ]
    fields = {**feature.fields, **feature.of_engine.get(engine, {})}
    changes += [at(f"spec.{path}", value) for path, value in fields.items()]
    changes += [at(f"spec.roles.{role}.pools.0.gpu", device) for role in feature.roles]
    document = minimal()
    both(*changes)(document)
    return document


def refused_at(feature: Feature, engine: str, device: str) -> list[str]:
    """Paths of the faults of an object with the feature; none = it is taken."""
    try:
        parse(document_of(feature, engine, device))
    except InvalidObjectError as e:
        return [fault.path for fault in e.faults]
    return []


def cell(feature: Feature, engine: str, device: str) -> str:
    if refused_at(feature, engine, device):
        return "refused"
    if device == CPU:
        return "run" if engine in feature.run else "not run"
    return "run, one H200" if engine == "pdcluster" and feature.on_gpu else "not run"


def test_the_table_is_what_is_taken_and_what_was_run() -> None:
    page = (ROOT / "docs/models.md").read_text()
    after = page.partition("## Features by engine and device\n")[2].partition("\n## ")[0]
    table = [line for line in after.splitlines() if line.startswith("|")][2:]
    assert table == [
        f"| {' | '.join([feature.name, *(cell(feature, *place) for place in PLACES)])} |"
        for feature in FEATURES
    ]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_what_runs_a_feature_is_there(feature: Feature) -> None:
    for engine, test in feature.run.items():
        assert cell(feature, engine, CPU) == "run"
        path, _, name = test.partition("::")
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        found = ast.walk(ast.parse((ROOT / path).read_text()))
        assert name in [each.name for each in found if isinstance(each, functions)]
    if feature.on_gpu:
        assert cell(feature, "pdcluster", GPU) == "run, one H200"
        assert f'Part("{feature.on_gpu}",' in (ROOT / "scripts/gpu_run.py").read_text()
        assert (ROOT / f"scripts/gpu/{feature.on_gpu}.py").exists()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_refusal_is_of_the_feature(feature: Feature) -> None:
    words = {"type", *re.findall(r"\w+", " ".join(re.findall("`(.+?)`", feature.name)))}
    for place in PLACES:
        paths = refused_at(feature, *place)
        assert not paths or any(path.rpartition(".")[2] in words for path in paths), paths
