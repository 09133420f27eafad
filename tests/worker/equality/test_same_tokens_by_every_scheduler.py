"""The same greedy tokens, whichever scheduler cuts the prompts and fills the steps, here and over P/D."""

from pathlib import Path

import pytest

from pdcluster_worker.engine.messages import RequestSpec, Sampling
from pdcluster_worker.engine.settings import SCHEDULER_NAMES, ChunkSchedule, SchedulerSettings
from tests.make_tiny_model import make_tiny_model
from tests.system.prompts import Prompts
from tests.worker.equality.engines import Cluster

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130, 200)
MAX_TOKENS = 18
FEW_BLOCKS = 40  # those of about three requests with their answers

OWN = {name: SchedulerSettings(name=name) for name in SCHEDULER_NAMES} | {
    "fcfs": SchedulerSettings(policy="fcfs"),
    "threshold": SchedulerSettings(long_prefill_token_threshold=24),
    "whole": SchedulerSettings(chunked_prefill=False),
    "sarathi-slo": SchedulerSettings(name="sarathi", tbt_slo_seconds=0.001),
    "sarathi-stages": SchedulerSettings(name="sarathi", chunk_schedule=ChunkSchedule(low=16, high=64, stages=3, max_tokens=200)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def answers(folder: Path, own: SchedulerSettings, *, remote: bool) -> list[list[int]]:
    """Token ids of all prompts asked at once; blocks are scarce where no peer asks for them."""
    budget = 4096 if own.computes_whole_prompts else 64
    num_blocks = 1024 if remote else FEW_BLOCKS
    cluster = Cluster(folder, num_blocks=num_blocks, max_batched_tokens=budget, scheduler=own)
    source = Prompts("every scheduler")
    sampling = Sampling(max_tokens=MAX_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    specs = [RequestSpec(f"r{index}", source(length), sampling) for index, length in enumerate(LENGTHS)]
    made = cluster.run(specs, remote=remote)
    for engine in (cluster.decode, cluster.prefill):
        engine.core.check()
    return [[token.token_id for token in answer] for answer in made]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return answers(folder, OWN["continuous"], remote=False)


@pytest.mark.parametrize("name", OWN)
def test_greedy_tokens_are_those_of_continuous(name: str, folder: Path, expected: list[list[int]]) -> None:
    assert answers(folder, OWN[name], remote=False) == expected


@pytest.mark.parametrize("name", SCHEDULER_NAMES)
def test_greedy_tokens_over_pd_are_those_of_continuous(name: str, folder: Path, expected: list[list[int]]) -> None:
    assert answers(folder, OWN[name], remote=True) == expected
