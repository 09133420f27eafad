"""Each rule of the PDCluster object: a good value passes, a bad one is refused with its path,
reason and fix.
"""

import datetime
from typing import Any

import pytest

from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse
from tests.schema.object_cases import GOOD, Change, at, minimal, vllm
from tests.schema.wrong_objects import BAD, InvalidObject


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD.keys())
def test_rules_accept(change: Change, document: dict[str, Any]) -> None:
    change(document)

    assert parse(document).metadata.namespace == "default"


@pytest.mark.parametrize("wrong", BAD, ids=[wrong.fault[:60] for wrong in BAD])
def test_rules_refuse(wrong: InvalidObject, document: dict[str, Any]) -> None:
    wrong.change(document)
    with pytest.raises(InvalidObjectError) as refused:
        parse(document)

    assert [str(fault)[: len(wrong.fault)] for fault in refused.value.faults] == [wrong.fault]


def test_rules_name_every_fault_at_once(document: dict[str, Any]) -> None:
    at("spec.service.port", 0)(document)
    at("spec.engine.threads", -1)(document)
    with pytest.raises(InvalidObjectError) as refused:
        parse(document)

    assert [fault.path for fault in refused.value.faults] == [
        "spec.engine.threads",
        "spec.service.port",
    ]


def test_flag_of_a_field_is_refused_with_a_line_break_behind_it(document: dict[str, Any]) -> None:
    vllm(args=["--tp\n"])(document)
    with pytest.raises(InvalidObjectError, match="--tp is the field tensorParallelSize of engine"):
        parse(document)


def test_engine_of_a_role_goes_over_the_cluster_engine(document: dict[str, Any]) -> None:
    at("spec.engine", {"maxBatchedTokens": 128, "maxSequences": 8})(document)
    # 256 is also the default: given counts, not different
    at("spec.roles.prefill.engine", {"maxBatchedTokens": 256})(document)
    spec = parse(document).spec

    assert (
        spec.engine_of("prefill").max_batched_tokens,
        spec.engine_of("prefill").max_sequences,
    ) == (256, 8)
    assert spec.engine_of("decode").max_batched_tokens == 128


@pytest.mark.parametrize("namespace", ["2024-models", "team-a"])
def test_namespace_may_start_with_a_digit(namespace: str, document: dict[str, Any]) -> None:
    document["metadata"]["namespace"] = namespace

    assert parse(document).metadata.namespace == namespace


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"hostname": datetime.date(2026, 1, 2)},
            "spec.podTemplate.spec.hostname: must be text, not datetime.date(2026, 1, 2); put it "
            "in quotes",
        ),
        (
            {"nodeSelector": {1: "a"}},
            "spec.podTemplate.spec.nodeSelector: the key 1 is not text; put it in quotes",
        ),
        (
            {"tolerations": [{"key": b"x"}]},
            "spec.podTemplate.spec.tolerations[0].key: must be text, not b'x'; put it in quotes",
        ),
    ],
)
def test_pod_template_refuses_what_json_cannot_say(
    spec: dict[Any, Any], message: str, document: dict[str, Any]
) -> None:
    """YAML in a file of `pdctl` can."""
    document["spec"]["podTemplate"] = {"spec": spec}
    with pytest.raises(InvalidObjectError) as refused:
        parse(document)

    assert str(refused.value) == message


def test_own_definition_of_an_accelerator_goes_over_the_known_one() -> None:
    document = minimal()
    at(
        "spec.accelerators",
        {"B200": {"nodeLabels": {"rack": "7"}}, "X1": {"resource": "x.example/gpu"}},
    )(document)
    at(
        "spec.roles.prefill.pools",
        [{"name": name.lower(), "gpu": name, "replicas": 1} for name in ("B200", "X1", "B300")],
    )(document)
    spec = parse(document).spec
    found = [spec.accelerator_of(pool) for pool in spec.roles.present()["prefill"].pools]

    assert [(each.resource, each.node_labels) for each in found] == [
        (None, {"rack": "7"}),
        ("x.example/gpu", {}),
        ("nvidia.com/gpu", {"nvidia.com/gpu.product": "NVIDIA-B300-SXM6-AC"}),
    ]


@pytest.mark.parametrize(
    ("amount", "in_bytes"),
    [
        ("1", 1),
        ("512Mi", 512 << 20),
        ("1.5G", 1_500_000_000),
        ("0.1Ki", 103),
        ("1.0000000001", 2),
        (7, 7),
    ],
)
def test_quantity_is_whole_bytes_rounded_up(
    amount: str | int, in_bytes: int, document: dict[str, Any]
) -> None:
    at("spec.engine.kvCacheMemory", amount)(document)

    assert parse(document).spec.engine.kv_cache_memory == in_bytes
