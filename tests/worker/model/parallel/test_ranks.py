"""Models that cannot be divided are refused before any rank is asked, and a rank's death breaks the
step [V29].
"""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import ModelConfig
from pdcluster_worker.engine.ports import EngineBrokenError
from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.loading.loader import load_model
from pdcluster_worker.model.parallel.ranks_loader import open_ranks
from pdcluster_worker.model.rank_layout import ParallelRank
from pdcluster_worker.model.runner_loader import open_runner
from pdcluster_worker.model.step_plan import StepLimits

Folder = Callable[[str], Path]
WAIT_SECONDS = 30.0


@pytest.mark.parametrize(
    ("kind", "tensor", "pipeline", "reason"),
    [
        (
            "olmo2",
            2,
            1,
            r"model type olmo2 is not one of .*; such a model runs on one rank only: set "
            r"engine\.tensorParallelSize and",
        ),
        (
            "mistral",
            2,
            1,
            r"engine\.tensorParallelSize of 2 .* its KV heads \(1\): set it to one of 1$",
        ),
        (
            "llama",
            4,
            1,
            r"engine\.tensorParallelSize of 4 .* its KV heads \(2\): set it to one of 1, 2$",
        ),
        (
            "few-experts",
            2,
            1,
            r"engine\.tensorParallelSize of 2 .* its experts \(3\): set it to one of 1$",
        ),
        ("llama", 1, 4, r"engine\.pipelineParallelSize of 4 is over this model's 2 layers"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    tiny_folder: Folder, kind: str, tensor: int, pipeline: int, reason: str
) -> None:
    loaded = load_model(tiny_folder(kind), "float32", block_size=16, threads=1)
    unasked: Any = SimpleNamespace(place=ParallelRank(tensor, pipeline))
    engine = EngineConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    with pytest.raises(ModelError, match=reason):
        open_ranks(loaded, engine, StepLimits(32, 8, 2048, 16), unasked)


def test_batch_invariance_is_refused_over_tensor_parallel_ranks(tiny_folder: Folder) -> None:
    loaded = load_model(tiny_folder("llama"), "float32", block_size=16, threads=1)
    unasked: Any = SimpleNamespace(place=ParallelRank(2))
    engine = EngineConfig(tensor_parallel_size=2, batch_invariant=True)
    with pytest.raises(
        ModelError, match=r"engine\.batchInvariant is for engine\.tensorParallelSize 1, not 2"
    ):
        open_ranks(loaded, engine, StepLimits(64, 64, 2048, 16), unasked)


def test_a_rank_that_cannot_load_is_reported(tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model folder .* does not exist"):
        open_runner(
            ModelConfig("tiny", str(tmp_path / "none")), EngineConfig(tensor_parallel_size=2)
        )


def test_a_dead_rank_is_reported_at_once_and_breaks_the_next_step(tiny_folder: Folder) -> None:
    """gemma over two ranks passes the proof (offset norms, a tied head); then rank 1 is killed."""
    occurrences: list[str] = []
    died = threading.Event()

    def on_death(reason: str) -> None:
        occurrences.append(reason)
        died.set()

    engine = EngineConfig(
        num_blocks=8, max_sequences=4, max_batched_tokens=32, threads=1, tensor_parallel_size=2
    )
    runner, _, _ = open_runner(
        ModelConfig("tiny", str(tiny_folder("gemma")), "float32"),
        engine,
        "cpu",
        on_rank_death=on_death,
    )
    try:
        batch = Batch(
            (
                Scheduled.of(
                    EngineRequest(
                        "a", [1, 2, 3], 3, SamplingParams(max_tokens=1, seed=0), block_table=[0]
                    ),
                    3,
                ),
            )
        )
        assert len(runner.execute(batch)) == 1
        (rank,) = [
            child
            for child in psutil.Process().children()
            if any("rank_process" in word for word in child.cmdline())
        ]
        os.kill(rank.pid, signal.SIGKILL)
        assert died.wait(WAIT_SECONDS)
        assert occurrences == ["rank 1 of this engine's 2 ended"]
        with pytest.raises(
            EngineBrokenError, match=r"rank 1 of this engine|a rank of this engine is gone"
        ):
            runner.execute(batch)
    finally:
        runner.close()
