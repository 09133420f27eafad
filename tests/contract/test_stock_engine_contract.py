"""A stock engine's fields: a place for every field of the engine, and flags that vLLM has."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from pydantic_core import PydanticCustomError

from pdcluster_api.manifests.stock import stock_command
from pdcluster_api.manifests.vllm import IN_CONTAINER
from pdcluster_api.manifests.worker_config import WorkerFileSettings, engine_file
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.load import load
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.stock_engine import (
    FIELD_OF_FLAG,
    PDCLUSTER_ONLY,
    SGLANG_FLAGS,
    STOCK_ONLY,
    check_argument,
)
from pdcluster_worker.config.engine import OURS_ALONE as WORKER_OURS_ALONE
from pdcluster_worker.config.engine import EngineConfig
from tests.operator.pdcluster_api.manifests.rendering import cluster_of
from tests.schema.object_cases import CPU, Change, at, sglang
from tests.schema.object_cases import vllm as stock
from tests.system.stock_sglang import NOT_ASKED as SGLANG_NOT_ASKED
from tests.system.stock_sglang import is_installed
from tests.system.stock_sglang import parsed as parsed_by_sglang
from tests.system.stock_vllm import NOT_ASKED, installed, parsed

EXAMPLES = Path(__file__).parents[2] / "examples"


def command_lines(cluster: PDCluster) -> Iterator[list[str]]:
    for role, declared in cluster.spec.roles.computing().items():
        engine = cluster.spec.engine_of(role)
        for pool in declared.pools:
            line = stock_command(cluster, pool, engine, "/m", IN_CONTAINER)
            # the kubelet puts the variables in, and vLLM takes a number
            yield [text.replace("$(LWS_WORKER_INDEX)", "1") for text in line]


def over_pods() -> PDCluster:
    return cluster_of(
        stock(dataParallelSize=4),
        *(at(f"spec.roles.{role}.pools.0.podsPerReplica", 2) for role in ("prefill", "decode")),
    )


SIZES = {
    "maxModelLen": 1,
    "maxSequences": 1,
    "maxBatchedTokens": 64,
    "blockSize": 32,
    "numBlocks": 1,
    "deviceMemoryShare": 0.5,
    "tensorParallelSize": 2,
    "pipelineParallelSize": 1,
    "prefixCaching": True,
}


def every_flag() -> PDCluster:
    return cluster_of(stock(**SIZES))


def test_every_field_of_an_engine_is_ours_a_stock_engine_s_or_a_flag() -> None:
    """A new field has to say what becomes of it where the engine is not ours."""
    fields = {str(field.alias) for field in EngineSpec.model_fields.values()}
    # a variable, and flags of which a pattern refuses all
    others = {"type", "threads", "dataParallelSize"}

    assert fields == {*PDCLUSTER_ONLY, *STOCK_ONLY, *FIELD_OF_FLAG.values(), *others}


def test_a_worker_refuses_every_field_that_is_not_rendered_for_a_stock_engine() -> None:
    cluster = cluster_of(
        stock(
            maxModelLen=64,
            maxSequences=1,
            maxBatchedTokens=64,
            blockSize=32,
            tensorParallelSize=2,
            pipelineParallelSize=1,
            dataParallelSize=2,
            prefixCaching=False,
        )
    )
    pool = cluster.spec.roles.present()["decode"].pools[0]
    site = WorkerFileSettings("/m", ("e:2379",), "ca", "certificate", "key")
    rendered = engine_file(cluster, "decode", pool, cluster.spec.engine_of("decode"), site)
    fields = {field.name: field.encode_name for field in msgspec.structs.fields(EngineConfig)}

    read = {fields[name] for name in fields if name not in WORKER_OURS_ALONE}
    assert read == rendered["engine"].keys()


def every_sglang_flag(*more: Change) -> PDCluster:
    return cluster_of(
        sglang(**{**SIZES, "prefixCaching": False}),
        at("spec.roles", {"mixed": {"pools": [CPU]}}),
        *more,
    )


def not_refused(cluster: PDCluster) -> set[str]:
    """Flags that are rendered and that a user may give."""
    *_, line = command_lines(cluster)
    flags = {text for text in line if text.startswith("-") and text != "-m"}
    return {flag for flag in flags if _may_be_given(flag)}


def _may_be_given(flag: str) -> bool:
    try:
        check_argument(flag)
    except PydanticCustomError:
        return False
    return True


def test_every_flag_that_is_rendered_is_refused_of_the_user() -> None:
    assert not_refused(every_flag()) == set()
    assert not_refused(every_sglang_flag()) == {"--log-level-http"}  # a default of ours


@pytest.mark.parametrize(
    ("cluster", "names"),
    [
        (every_flag, {*FIELD_OF_FLAG} - {"tp", "pp", "no-enable-prefix-caching"}),
        (every_sglang_flag, {*SGLANG_FLAGS}),
    ],
)
def test_every_flag_of_a_field_is_rendered(
    cluster: Callable[[], PDCluster], names: set[str]
) -> None:
    *_, line = command_lines(cluster())

    assert {text.lstrip("-") for text in line} >= names


@pytest.mark.skipif(not is_installed(), reason=SGLANG_NOT_ASKED)
@pytest.mark.timeout(300)
def test_sglang_s_own_parser_takes_every_command_line() -> None:
    over_pods = at("spec.roles.mixed.pools.0.podsPerReplica", 2)
    clusters = every_sglang_flag(), every_sglang_flag(over_pods)
    lines = [line[3:] for cluster in clusters for line in command_lines(cluster)]

    assert parsed_by_sglang(lines) == [" ".join(line) for line in lines]


@pytest.mark.skipif(not installed(parser_only=True), reason=NOT_ASKED)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", installed(parser_only=True))
def test_vllm_s_own_parser_takes_every_command_line(version: str) -> None:
    clusters = [every_flag(), over_pods(), *map(load, sorted(EXAMPLES.glob("*.yaml")))]
    of_stock = [each for each in clusters if each.spec.engine.type == "vllm"]
    lines = [line[1:] for cluster in of_stock for line in command_lines(cluster)]

    assert len(lines) > 2
    folder = installed(parser_only=True)[version]
    assert parsed(folder, lines) == [" ".join(line) for line in lines]
