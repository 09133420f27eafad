"""Settings of each engine of a worker, and settings that are refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_worker.config import worker
from pdcluster_worker.config.worker import (
    WorkerConfig,
    has_board,
    load_worker_config,
    share_of,
    thread_share,
)
from pdcluster_worker.errors import ConfigError
from tests.worker.config.engine_files import MINIMUM, write


def loaded(folder: Path, role: str = "mixed", **engine: Any) -> WorkerConfig:
    file = yaml.safe_load(MINIMUM) | {"role": role, "engine": engine}
    return load_worker_config(write(folder, yaml.safe_dump(file)))


def test_engines_divide_what_is_the_worker_s(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        dataParallelSize=3,
        threads=7,
        kvCacheMemory=100,
        numBlocks=10,
        transferBandwidth=9,
        deviceMemoryShare=0.9,
    )
    shares = [share_of(config, rank) for rank in range(3)]

    for share in shares:
        engine = share.engine
        assert (
            engine.threads,
            engine.kv_cache_memory,
            engine.num_blocks,
            engine.transfer_bandwidth,
        ) == (2, 33, 3, 3)
        assert engine.device_memory_share == pytest.approx(0.3)
        assert (engine.max_batched_tokens, engine.max_sequences) == (256, 64)  # of each
    assert [share.listen.kv for share in shares] == [9100, 9101, 9102]


@pytest.mark.parametrize(
    ("sizes", "ports"),
    [({"tensorParallelSize": 4}, [9100, 9104]), ({"pipelineParallelSize": 2}, [9100, 9101])],
)
def test_each_engine_has_kv_ports_for_its_ranks(
    tmp_path: Path, sizes: dict[str, int], ports: list[int]
) -> None:
    config = loaded(tmp_path, dataParallelSize=2, **sizes)

    assert [share_of(config, rank).listen.kv for rank in range(2)] == ports


@pytest.mark.parametrize(("size", "num_blocks", "share"), [(4, 15, 3), (8, 63, 7), (2, 2, 1)])
def test_few_blocks_are_divided_for_the_pool_to_judge(
    tmp_path: Path, size: int, num_blocks: int, share: int
) -> None:
    config = loaded(tmp_path, dataParallelSize=size, numBlocks=num_blocks)

    assert [share_of(config, rank).engine.num_blocks for rank in range(size)] == [share] * size


def test_share_of_a_lone_engine_is_all(tmp_path: Path) -> None:
    config = loaded(tmp_path, threads=3)

    assert share_of(config, 0) is config
    assert thread_share(loaded(tmp_path).engine) == 0  # the machine says


def test_share_leaves_what_is_not_limited_as_it_is_and_every_engine_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "available_threads", lambda: 2)
    config = loaded(tmp_path, dataParallelSize=4)

    share = share_of(config, 3).engine
    assert (
        share.threads,
        share.num_blocks,
        share.transfer_bandwidth,
        share.device_memory_share,
    ) == (1, None, 0, None)


@pytest.mark.parametrize(
    ("role", "engine", "reason"),
    [
        ("mixed", {"dataParallelSize": 0}, "`int` >= 1"),
        ("mixed", {"dataParallelSize": 9}, "dataParallelSize must be at most 8, not 9"),
        (
            "mixed",
            {"dataParallelSize": 4, "numBlocks": 3},
            r"engine\.yaml: engine\.numBlocks \(3\) must be at least dataParallelSize \(4\), whose "
            r"engines share them: raise it$",
        ),
        ("mixed", {"prefillDelayer": {"maxDelayPasses": 0}}, "`int` >= 1"),
        ("mixed", {"prefillDelayer": {"maxDelayPasses": 10_001}}, "`int` <= 10000"),
        ("mixed", {"prefillDelayer": {"maxDelayMilliseconds": 0}}, "`int` >= 1"),
        ("mixed", {"prefillDelayer": {"maxDelayMilliseconds": 600_001}}, "`int` <= 600000"),
        ("mixed", {"prefillDelayer": {"tokenUsageLowWatermark": 0.0}}, "> 0"),
        ("mixed", {"prefillDelayer": {"tokenUsageLowWatermark": 1.1}}, "<= 1"),
        ("mixed", {"prefillDelayer": {"queueMinRatio": 0.0}}, "> 0"),
        ("mixed", {"prefillDelayer": {"queueMinRatio": 1.1}}, "<= 1"),
        ("mixed", {"prefillDelayer": {"passes": 1}}, "unknown field `passes`"),
    ],
)
def test_wrong_setting_is_refused_with_its_reason(
    tmp_path: Path, role: str, engine: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        loaded(tmp_path, role, **engine)


def test_delayer_may_stand_switched_off_on_a_decode_worker(tmp_path: Path) -> None:
    assert (
        loaded(tmp_path, "decode", prefillDelayer={"enabled": False}).engine.prefill_delayer
        is not None
    )


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"dataParallelSize": 2, "prefillDelayer": {}}, True),
        ({"dataParallelSize": 2, "prefillDelayer": {"enabled": False}}, False),
        ({"dataParallelSize": 2}, False),
        ({"prefillDelayer": {}}, False),
    ],
)
def test_engines_share_a_board_where_they_have_something_to_say(
    tmp_path: Path, engine: dict[str, Any], expected: bool
) -> None:
    assert has_board(loaded(tmp_path, **engine).engine) is expected
