"""Sizes of our engine by the device of its pool, and that the worker takes them."""

from typing import Any

import pytest

from pdcluster_api.manifests.worker_config import policy_file
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.manifests.rendering import cluster_of, engine_of
from tests.schema.object_cases import Change, at, vllm

ON_GPU = at("spec.roles.decode.pools.0.gpu", "B200")
DEFAULT = {"maxBatchedTokens": 8192, "maxSequences": 256, "deviceMemoryShare": 0.9}


def engine(**fields: Any) -> Change:
    return at("spec.engine", fields)


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ({}, DEFAULT),
        # the worker's own defaults, which are left out
        ({"maxBatchedTokens": 256, "maxSequences": 64}, {"deviceMemoryShare": 0.9}),
        ({"maxBatchedTokens": 512}, DEFAULT | {"maxBatchedTokens": 512}),
        ({"maxBatchedTokens": 128}, DEFAULT | {"maxBatchedTokens": 128, "maxSequences": 128}),
        ({"maxSequences": 200}, DEFAULT | {"maxSequences": 200}),
        ({"deviceMemoryShare": 0.5}, DEFAULT | {"deviceMemoryShare": 0.5}),
        ({"numBlocks": 9}, {"maxBatchedTokens": 8192, "maxSequences": 256, "numBlocks": 9}),
        ({"kvCacheMemory": "1Gi"}, {"maxBatchedTokens": 8192, "maxSequences": 256}),
        ({"device": "cpu"}, {"device": "cpu"}),
    ],
)
def test_sizes_on_an_accelerator_are_its_own_unless_they_are_given(
    given: dict[str, Any], rendered: dict[str, Any]
) -> None:
    assert engine_of(engine(**given), ON_GPU)["engine"] == rendered


def test_values_of_the_spec_and_of_the_role_are_given() -> None:
    role = at("spec.roles.decode.engine", {"maxSequences": 100})

    assert engine_of(engine(maxBatchedTokens=1000), role, ON_GPU)["engine"] == {
        "maxBatchedTokens": 1000,
        "maxSequences": 100,
        "deviceMemoryShare": 0.9,
    }


def test_sizes_on_a_cpu_and_of_a_stock_engine_stay_theirs() -> None:
    assert engine_of()["engine"] == {}
    assert "deviceMemoryShare" not in engine_of(vllm(), ON_GPU)["engine"]


@pytest.mark.parametrize("tokens", [1, 63, 255, 256, 9000])
@pytest.mark.parametrize("sequences", [None, 1])
def test_a_step_has_always_room_for_a_token_of_each(tokens: int, sequences: int | None) -> None:
    given = {} if sequences is None else {"maxSequences": sequences}
    sized = EngineSpec(**{"maxBatchedTokens": tokens, **given}).sized_for("B200")

    assert sized.max_sequences <= sized.max_batched_tokens == tokens


@pytest.mark.parametrize(
    "given",
    [
        {"maxSequences": 512},
        {"maxSequences": 8192},
        {"maxBatchedTokens": 32},
        {"scheduler": "orca", "maxModelLen": 8192},
    ],
)
def test_rules_hold_for_the_sizes_of_the_device(given: dict[str, Any]) -> None:
    both = (at("spec.roles.prefill.pools.0.gpu", "B200"), ON_GPU)
    cluster_of(engine(**given), *both)
    for few in ([], [ON_GPU], [*both, engine(**given, device="cpu")]):
        with pytest.raises(InvalidObjectError):
            cluster_of(engine(**given), *few)


def test_more_requests_than_tokens_of_a_step_are_refused_on_an_accelerator_too() -> None:
    with pytest.raises(InvalidObjectError, match=r"must be at least maxSequences \(8193\)"):
        cluster_of(engine(maxSequences=8193), at("spec.roles.prefill.pools.0.gpu", "B200"), ON_GPU)


def revision(*changes: Change) -> str:
    return revision_of(cluster_of(*changes).spec)


def test_a_default_of_cpus_that_is_given_is_another_revision_than_none_given() -> None:
    for given in (engine(maxBatchedTokens=256), engine(kvCacheMemory="1Gi")):
        assert revision(given, ON_GPU) != revision(ON_GPU)
        assert revision(given) != revision()
    assert revision(engine(blockSize=16), ON_GPU) == revision(ON_GPU)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ([], 20),
        ([ON_GPU], 120),
        ([ON_GPU, vllm()], 120),
        ([ON_GPU, engine(device="cpu")], 20),
        ([ON_GPU, at("spec.qos.stallSeconds", 20)], 20),
        ([at("spec.qos.stallSeconds", 7)], 7),
    ],
    ids=["cpu", "gpu", "vllm", "idle-gpu", "given-gpu", "given"],
)
def test_an_engine_on_an_accelerator_may_be_still_for_longer(
    changes: list[Change], seconds: int
) -> None:
    assert policy_file(cluster_of(*changes))["stallSeconds"] == seconds
