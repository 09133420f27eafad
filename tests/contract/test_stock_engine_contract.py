"""A stock engine's fields: a place for every field of the engine, and flags that vLLM has."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pdcluster_api.manifests import vllm
from pdcluster_api.manifests.worker_config import WorkerFileSettings, engine_file
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.load import load
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.vllm_engine import (
    FIELD_OF_FLAG,
    FLAGS_OF_FIELDS,
    OWNED_FLAGS,
    PDCLUSTER_ONLY,
    VLLM_ONLY,
)
from pdcluster_worker.config.engine import OURS_ALONE as WORKER_OURS_ALONE
from pdcluster_worker.config.engine import EngineConfig
from tests.operator.pdcluster_api.manifests.rendering import cluster_of
from tests.schema.object_cases import at
from tests.schema.object_cases import vllm as stock
from tests.system.stock_vllm import NOT_ASKED, installed, parsed

EXAMPLES = Path(__file__).parents[2] / "examples"


def command_lines(cluster: PDCluster) -> Iterator[list[str]]:
    for role, declared in cluster.spec.roles.computing().items():
        engine = cluster.spec.engine_of(role)
        for pool in declared.pools:
            line = vllm.vllm_command(cluster, pool, engine, "/m", vllm.IN_CONTAINER)
            # the kubelet puts the variables in, and vLLM takes a number
            yield [text.replace("$(LWS_WORKER_INDEX)", "1") for text in line]


def over_pods() -> PDCluster:
    return cluster_of(
        stock(dataParallelSize=4),
        *(at(f"spec.roles.{role}.pools.0.podsPerReplica", 2) for role in ("prefill", "decode")),
    )


def every_flag() -> PDCluster:
    return cluster_of(
        stock(
            maxModelLen=1,
            maxSequences=1,
            maxBatchedTokens=1,
            blockSize=32,
            numBlocks=1,
            deviceMemoryShare=0.5,
            tensorParallelSize=2,
            pipelineParallelSize=1,
            prefixCaching=True,
        )
    )


def test_every_field_of_an_engine_is_ours_a_stock_engine_s_or_a_flag() -> None:
    """A new field has to say what becomes of it where the engine is not ours."""
    fields = {str(field.alias) for field in EngineSpec.model_fields.values()}
    # a variable, and flags of which a pattern refuses all
    others = {"type", "threads", "dataParallelSize"}

    assert fields == {*PDCLUSTER_ONLY, *VLLM_ONLY, *FIELD_OF_FLAG.values(), *others}


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


def test_every_flag_that_is_rendered_is_refused_of_the_user() -> None:
    _, line = command_lines(every_flag())
    flags = [text for text in line if text.startswith("-")]

    assert [
        flag
        for flag in flags
        if not re.search(OWNED_FLAGS, flag) and not re.search(FLAGS_OF_FIELDS, flag)
    ] == []
    assert {flag.lstrip("-") for flag in flags} >= set(FIELD_OF_FLAG) - {
        "tp",
        "pp",
        "no-enable-prefix-caching",
    }


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
