"""The same tokens by every scheduler, over any ranks and engines, on every path: one table.

Engines of one column share a model: the rank processes of `tp 2` and `pp 2` talk by
gloo, `dp 2` is two engines that share the requests, and `ahead` submits a step while
another computes, as ranks do too.  The expected tokens are those of one request
at a time on one engine; half of the requests are greedy, half seeded, with penalties.
KV blocks move between engines of unequal ranks, bytes and checksums compared.
"""

from collections.abc import Iterator
from itertools import count, cycle
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from pdcluster_worker.engine.ports import Drafter
from pdcluster_worker.messages.engine import DeferGroups, EngineOutput
from pdcluster_worker.messages.engine_settings import (
    SCHEDULER_NAMES,
    ChunkSchedule,
    SchedulerSettings,
)
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.model import prompt_logprobs
from tests.make_tiny_model import make_tiny_model
from tests.reference import Reference
from tests.system.prompts import Prompts
from tests.transports import need_transport
from tests.worker.equality.answers import check
from tests.worker.equality.engines import (
    CONTINUOUS,
    MAX_SEQUENCES,
    Guesses,
    Model,
    Pair,
    SocketWiring,
    Wiring,
    engines_over,
)

LENGTHS = (1, 16, 17, 64, 63, 65, 130, 33)  # blocks are 16, chunks 64
NUM_TOKENS = 18  # more than a block, so that every request grows
MAX_MODEL_LEN = 160
FEW_BLOCKS = {1: 14, 2: 12}  # by the engines that share the requests: those of about half of them

COLUMNS = ("tp 1", "ahead", "tp 2", "pp 2", "dp 2")
PATHS = ("local and cached", "preempted", "remote", "remote from")
OWN = {name: SchedulerSettings(name=name) for name in SCHEDULER_NAMES}
VARIANTS = {
    "fcfs": SchedulerSettings(policy="fcfs"),
    "threshold": SchedulerSettings(long_prefill_token_threshold=24),
    "whole": SchedulerSettings(chunked_prefill=False),
    "sarathi-slo": SchedulerSettings(name="sarathi", tbt_slo_seconds=0.001),
    "sarathi-stages": SchedulerSettings(
        name="sarathi", chunk_schedule=ChunkSchedule(low=16, high=64, stages=3, max_tokens=130)
    ),
}
SIZES: dict[str, dict[str, int]] = {
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
}


class Models(dict[str, Model]):
    """Each is loaded when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Model:
        if name == "ahead":
            self[name] = self["tp 1"].ahead()
        else:
            self[name] = Model(self.folder, max_batched_tokens=MAX_MODEL_LEN, **SIZES.get(name, {}))
        return self[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))
    yield made
    for model in made.values():
        model.runner.close()


def specs(case: str) -> list[RequestSpec]:
    """Greedy and seeded requests in turns."""
    source = Prompts("every column")
    found = []
    for index, length in enumerate(LENGTHS):
        drawn = {
            "temperature": 0.8,
            "top_p": 0.95,
            "presence_penalty": 0.4,
            "repetition_penalty": 1.2,
            "logit_bias": {7: 1.5},
        }
        sampling = SamplingParams(
            max_tokens=NUM_TOKENS,
            seed=index,
            ignore_eos=True,
            logprobs=1,
            **(drawn if index % 2 else {"temperature": 0.0}),
        )
        found.append(RequestSpec(f"{case}-{index}", source(length), sampling))
    return found


def pair_of(
    models: Models,
    column: str,
    path: str,
    own: SchedulerSettings,
    drafter: Drafter | None = None,
    wiring: Wiring | None = None,
) -> Pair:
    """The engines of a cell; `remote from` prefills there and decodes on one rank."""
    decodes = ["tp 1", "other"] if column == "dp 2" else [column]
    names = (
        [column if column != "dp 2" else "tp 1", "peer"]
        if path == "remote from"
        else ["peer", *decodes]
    )
    sizes = {
        "num_blocks": FEW_BLOCKS[len(names) - 1] if path == "preempted" else 256,
        "max_batched_tokens": MAX_MODEL_LEN if own.computes_whole_prompts else 64,
        "max_model_len": MAX_MODEL_LEN,
        "max_sequences": 2 if path == "evicted" else MAX_SEQUENCES,
    }
    return Pair(
        *engines_over(
            [models[name] for name in names],
            scheduler=own,
            drafter=drafter,
            wiring=wiring,
            **sizes,
        )
    )


@pytest.fixture(scope="module")
def reference(models: Models) -> Reference:
    return Reference(models.folder)


@pytest.fixture(scope="module")
def expected(models: Models) -> list[list[Token]]:
    pair = pair_of(models, "tp 1", "local and cached", CONTINUOUS)
    return [pair.run([spec], remote=False)[0] for spec in specs("expected")]


def check_cell(pair: Pair, path: str, own: SchedulerSettings, expected: list[list[Token]]) -> None:
    is_remote = path.startswith("remote")
    check(pair.run(specs("first"), remote=is_remote), expected)
    if path == "local and cached":
        again = pair.run(specs("again"), remote=False)
        check(again, expected)
        assert [answer[0].cached_tokens for answer in again] == [
            (length - 1) // 16 * 16 for length in LENGTHS
        ]
    num_preemptions = num_bytes = 0
    for engine in pair.engines:
        engine.core.check()
        counts = engine.core.pool.counts()
        assert counts["in_use"] == counts["receiving"] == counts["quarantined"] == 0
        num_preemptions += engine.stats.preemptions
        num_bytes += engine.stats.bytes_received
    assert (num_bytes > 0) == is_remote
    never = own.name in ("orca", "request-level")
    assert (num_preemptions > 0) == (path == "preempted" and not never)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", OWN)
def test_tokens_are_those_of_one_request_at_a_time(
    name: str, column: str, path: str, models: Models, expected: list[list[Token]]
) -> None:
    check_cell(pair_of(models, column, path, OWN[name]), path, OWN[name], expected)


@pytest.mark.parametrize("name", OWN)
def test_evictions_for_other_groups_change_no_token(
    name: str, models: Models, expected: list[list[Token]]
) -> None:
    """Every few steps another half of the requests is deferred and evicted."""
    pair = pair_of(models, "tp 1", "evicted", OWN[name])
    engine = pair.decode
    grouped = [replace(spec, group="ab"[index % 2]) for index, spec in enumerate(specs("evicted"))]
    turns = cycle([DeferGroups(["a"], evicts=True), DeferGroups(["b"], evicts=True)])
    steps, step = count(), engine.step

    def deferring_step() -> list[EngineOutput]:
        if next(steps) % 5 == 3:
            engine.core.handle(next(turns))
        return step()

    engine.step = deferring_step  # type: ignore[method-assign]
    check(pair.run(grouped, remote=False), expected)
    assert engine.stats is not None
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize(
    ("column", "path"),
    [
        ("tp 1", "remote"),
        *((column, path) for column in ("tp 2", "pp 2") for path in ("remote", "remote from")),
    ],
)
@pytest.mark.parametrize("transport", ["tcp", "nixl", "ucx"])
def test_transport_changes_no_token(
    transport: str, column: str, path: str, models: Models, expected: list[list[Token]]
) -> None:
    wiring = SocketWiring(need_transport(transport))
    try:
        pair = pair_of(models, column, path, CONTINUOUS, wiring=wiring)
        check_cell(pair, path, CONTINUOUS, expected)
        assert {done.transport for done in pair.done} == {transport}
    finally:
        wiring.close()


@pytest.mark.parametrize("column", ["tp 1", "ahead"])
@pytest.mark.parametrize("name", VARIANTS)
def test_settings_of_a_scheduler_change_no_token(
    name: str, column: str, models: Models, expected: list[list[Token]]
) -> None:
    own = VARIANTS[name]
    check_cell(pair_of(models, column, "preempted", own), "preempted", own, expected)


def check_drafts(pair: Pair) -> None:
    found = [engine.stats for engine in pair.decodes]
    assert (
        sum(sum(stats.drafted) for stats in found) > sum(sum(stats.accepted) for stats in found) > 0
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("column", COLUMNS)
def test_drafts_change_no_token(
    column: str, path: str, models: Models, expected: list[list[Token]]
) -> None:
    pair = pair_of(models, column, path, CONTINUOUS, Guesses(expected))
    check_cell(pair, path, CONTINUOUS, expected)
    check_drafts(pair)


@pytest.mark.parametrize("name", [name for name in OWN if name != "continuous"])
def test_drafts_of_a_scheduler_change_no_token(
    name: str, models: Models, expected: list[list[Token]]
) -> None:
    pair = pair_of(models, "tp 1", "preempted", OWN[name], Guesses(expected))
    check_cell(pair, "preempted", OWN[name], expected)
    check_drafts(pair)


def check_prompt(answer: list[Token], logprobs: torch.Tensor) -> None:
    """Compare an answer's prompt log probabilities with transformers' [N - 1, vocab_size]; the
    order of near ties may differ.
    """
    said, prompt = answer[0].prompt_logprobs, answer[0].request_id
    assert len(said) == len(logprobs), prompt
    assert all(not token.prompt_logprobs for token in answer[1:])
    for one, row in zip(said, logprobs, strict=True):
        assert [value for _, value in one.top_logprobs] == pytest.approx(
            row.topk(2).values.tolist(), abs=1e-4
        )
        assert [value for _, value in one.top_logprobs] == pytest.approx(
            [row[token].item() for token, _ in one.top_logprobs], abs=1e-4
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("column", COLUMNS)
def test_log_probabilities_of_prompts_are_those_of_transformers(
    column: str, path: str, models: Models, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases: chunks, steps that run in parts, ranks, a prefill worker, and a cached prompt."""
    monkeypatch.setattr(prompt_logprobs, "MOST_ROWS", 24)
    pair = pair_of(models, column, path, CONTINUOUS)
    source = Prompts("every column")
    prompts = [source(length) for length in LENGTHS]
    for case in ("first", "again"):
        sampling = SamplingParams(
            max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True, prompt_logprobs=2
        )
        requests = [
            RequestSpec(f"{case}-{index}", prompt, sampling) for index, prompt in enumerate(prompts)
        ]
        for prompt, answer in zip(
            prompts, pair.run(requests, remote=path.startswith("remote")), strict=True
        ):
            expected = reference.prompt_logprobs(prompt)
            check_prompt(answer, expected)
            chosen = expected[
                torch.arange(len(expected)), torch.tensor(prompt[1:], dtype=torch.long)
            ]
            assert [one.logprob for one in answer[0].prompt_logprobs] == pytest.approx(
                chosen.tolist(), abs=1e-4
            )
            ranks = (
                (expected > chosen[:, None] + 1e-4).sum(1) + 1,
                (expected > chosen[:, None] - 1e-4).sum(1),
            )
            assert all(
                low <= one.rank <= max(low, high)
                for one, low, high in zip(answer[0].prompt_logprobs, *ranks, strict=True)
            )
            assert answer[0].cached_tokens == 0
            reference.check(prompt, [token.token_id for token in answer])


def test_blocks_move_between_tensor_parallel_ranks_and_stages(
    models: Models, expected: list[list[Token]]
) -> None:
    sizes = {"num_blocks": 256, "max_model_len": MAX_MODEL_LEN}
    pair = Pair(*engines_over([models["tp 2"], models["pp 2"]], **sizes))
    check_cell(pair, "remote", CONTINUOUS, expected)
