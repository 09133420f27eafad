"""`dtype: auto` is one answer for a revision, whatever the CPUs of its workers say."""

import asyncio
import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdcluster_schema.etcd_keys import dtype_key
from pdcluster_worker.config.worker import DiscoveryConfig
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.peers.etcd import Etcd, agreed_dtype
from pdcluster_worker.system.native_dtype import (
    CPU_INFO,
    DType,
    log_speed,
    native_dtype,
    read_native_dtype,
)

SAPPHIRE_RAPIDS = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n"
BROADWELL = "processor\t: 0\nflags\t\t: fpu sse2 avx2\n"


@pytest.fixture
def key() -> str:
    return dtype_key(uuid.uuid4().hex, "chat", "r1")


async def ask(etcd: Any, key: str, cpu_info: str) -> DType:
    """A worker on such a CPU asks."""
    endpoints = DiscoveryConfig(endpoints=[etcd.endpoint])
    return await agreed_dtype(endpoints, key, native_dtype(cpu_info), lambda problem: None)


@pytest.mark.parametrize(
    ("first", "second", "agreed"),
    [(SAPPHIRE_RAPIDS, BROADWELL, "bfloat16"), (BROADWELL, SAPPHIRE_RAPIDS, "float32")],
)
async def test_two_cpu_generations_of_a_revision_compute_in_one_dtype(
    shared_etcd: Any, key: str, first: str, second: str, agreed: DType
) -> None:
    assert native_dtype(first) != native_dtype(second)
    assert [await ask(shared_etcd, key, cpu) for cpu in (first, second, first)] == [agreed] * 3


async def test_workers_that_start_at_once_agree(shared_etcd: Any, key: str) -> None:
    cpus = [SAPPHIRE_RAPIDS, BROADWELL] * 4

    assert len(set(await asyncio.gather(*(ask(shared_etcd, key, cpu) for cpu in cpus)))) == 1


async def test_another_revision_decides_again(shared_etcd: Any, key: str) -> None:
    await ask(shared_etcd, key, BROADWELL)

    assert await ask(shared_etcd, f"{key}2", SAPPHIRE_RAPIDS) == "bfloat16"


async def test_an_etcd_that_is_away_is_waited_for_and_named(
    stopped_etcd: Any, key: str, eventually: Callable[..., Any]
) -> None:
    said: list[str] = []
    config = DiscoveryConfig(endpoints=[stopped_etcd.endpoint])
    asking = asyncio.create_task(agreed_dtype(config, key, "float32", said.append))
    await eventually(lambda: said)
    assert stopped_etcd.endpoint in said[0]

    stopped_etcd.start()

    assert await asyncio.wait_for(asking, 20) == "float32"


async def test_a_value_that_is_no_dtype_is_refused_with_its_key(shared_etcd: Any, key: str) -> None:
    shared_etcd.ctl("put", key, "int4")

    with pytest.raises(ConfigError, match=f"'int4' under {key}.*delete that key"):
        await ask(shared_etcd, key, BROADWELL)


async def test_an_etcd_that_came_back_empty_learns_the_dtype_from_running_workers(
    own_etcd: Any, watcher: Any, eventually: Callable[..., Any]
) -> None:
    running = watcher(own_etcd.endpoint, "a", pinned={"/dtypes/r1": b"bfloat16"})
    await eventually(lambda: running.pods == {"a"})
    own_etcd.kill()

    own_etcd.start(empty=True)

    async with Etcd(own_etcd.endpoint, 5.0) as etcd:

        async def is_there() -> bool:
            return bool((await etcd.read("/dtypes/r1")).values)

        while not await is_there():
            await asyncio.sleep(0.05)
    assert await ask(own_etcd, "/dtypes/r1", BROADWELL) == "bfloat16"


def test_torch_and_the_cpu_flags_say_the_same_here() -> None:
    has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert read_native_dtype() == ("bfloat16" if has else "float32")


def test_a_machine_that_does_not_tell_its_flags_computes_in_float32(tmp_path: Path) -> None:
    assert read_native_dtype(tmp_path / "cpuinfo") == "float32"
    assert native_dtype("processor : 0\nFeatures : asimd bf16\n") == "float32"
    assert Path("/proc/cpuinfo") == CPU_INFO


@pytest.mark.parametrize(
    ("dtype", "native", "level", "said"),
    [
        ("bfloat16", "float32", logging.WARNING, "does not multiply natively"),
        ("float32", "bfloat16", logging.INFO, "is faster in bfloat16"),
        ("float32", "float32", None, ""),
        ("bfloat16", "bfloat16", None, ""),
    ],
)
def test_a_dtype_that_is_slow_here_is_reported(
    caplog: pytest.LogCaptureFixture, dtype: DType, native: DType, level: int | None, said: str
) -> None:
    caplog.set_level(logging.INFO)
    log_speed(dtype, native)

    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    assert said in caplog.text
