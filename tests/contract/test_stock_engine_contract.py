"""A stock engine's fields in the CRD and in the model: the same patterns, and a place for every
field of the engine.
"""

import re
from pathlib import Path

import msgspec
import yaml

from pdcluster_api.manifests import vllm
from pdcluster_api.manifests.worker_config import WorkerFileSettings, engine_file
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.vllm_engine import (
    FIELD_OF_FLAG,
    FLAG_PATTERN,
    FLAGS_OF_FIELDS,
    LONG_FLAGS,
    OWNED_FLAGS,
    OWNED_VARIABLES,
    PDCLUSTER_ONLY,
    VLLM_ONLY,
)
from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.vllm import OURS_ALONE as WORKER_OURS_ALONE
from tests.operator.pdcluster_api.manifests.rendering import cluster_of
from tests.schema.object_cases import vllm as stock

ROOT = Path(__file__).parents[2]
SPEC = yaml.safe_load((ROOT / "crds" / "pdcluster.yaml").read_text())["spec"]["versions"][0][
    "schema"
]["openAPIV3Schema"]["properties"]["spec"]
ENGINE = SPEC["properties"]["engine"]["properties"]


def rules_of(schema: dict[str, object]) -> list[str]:
    found = schema["x-kubernetes-validations"]
    assert isinstance(found, list)
    return [rule["rule"] for rule in found]


def test_both_refuse_the_same_flags_and_variables() -> None:
    assert rules_of(ENGINE["args"]["items"]) == [
        f"!self.replace('_', '-').matches('{OWNED_FLAGS}')",
        f"!self.replace('_', '-').matches('{FLAGS_OF_FIELDS}')",
        f"!self.matches('{FLAG_PATTERN}') || !'{LONG_FLAGS}'.contains("
        f"' ' + self.replace('_', '-').find('{FLAG_PATTERN}'))",
    ]
    assert f"!self.matches('{OWNED_VARIABLES}')" in rules_of(
        ENGINE["env"]["items"]["properties"]["name"]
    )
    said = ENGINE["args"]["items"]["x-kubernetes-validations"][1]["message"]
    assert all(field in said for field in FIELD_OF_FLAG.values())


def test_both_refuse_the_same_fields() -> None:
    rules = [
        rule["rule"] for rule in SPEC["x-kubernetes-validations"] if ".?image." in rule["rule"]
    ]
    ours = [
        rule["rule"] for rule in SPEC["x-kubernetes-validations"] if ".?device." in rule["rule"]
    ]
    refused = [rule for rule in ours if ".?speculation.hasValue()" in rule]

    assert len(refused) == 4
    for rule in refused:
        assert re.findall(r"\bengine\.\?(\w+)\.hasValue", rule) == list(PDCLUSTER_ONLY)
    assert all(f".?{field}.hasValue()" in rules[0] for field in VLLM_ONLY)


def test_every_field_of_an_engine_is_ours_a_stock_engine_s_or_a_flag() -> None:
    """A new field has to say what becomes of it where the engine is not ours."""
    fields = {str(field.alias) for field in EngineSpec.model_fields.values()}
    # rendered as a variable
    others = {"type", "threads"}

    assert fields == {*PDCLUSTER_ONLY, *VLLM_ONLY, *FIELD_OF_FLAG.values(), *others}


def test_a_worker_refuses_every_field_that_is_not_rendered_for_a_stock_engine() -> None:
    cluster = cluster_of(
        stock(
            maxModelLen=64,
            maxSequences=1,
            maxBatchedTokens=64,
            blockSize=32,
            tensorParallelSize=2,
            pipelineParallelSize=2,
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
    cluster = cluster_of(
        stock(
            maxModelLen=1,
            maxSequences=1,
            maxBatchedTokens=1,
            blockSize=32,
            numBlocks=1,
            deviceMemoryShare=0.5,
            tensorParallelSize=2,
            pipelineParallelSize=2,
            prefixCaching=True,
        )
    )
    pool = cluster.spec.roles.present()["decode"].pools[0]
    line = vllm.vllm_command(
        cluster, pool, cluster.spec.engine_of("decode"), "/m", vllm.IN_CONTAINER
    )
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
