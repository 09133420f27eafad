"""OtherModelsServed, by what the other PDClusters say."""

from typing import Any

import pytest

from pdcluster_api.apiserver.other_clusters import other_cluster
from pdcluster_api.plan.status.other_models import other_models_served
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from tests.schema.object_cases import minimal

SERVING = {"conditions": [{"type": "Serving", "status": "True", "reason": "Answering"}]}
ASLEEP = {"conditions": [{"type": "Serving", "status": "False", "reason": "ScaledToZero"}]}
SMALL: dict[str, Any] = {
    "spec": {"model": {"name": "small", "adapters": [{"name": "sql"}]}},
    "status": SERVING,
}


def cluster(*models: dict[str, Any]) -> PDCluster:
    content = minimal()
    content["spec"]["service"] = {"models": [*models]}
    return parse(content)


def condition_of(other: dict[str, Any] | None, **model: Any) -> tuple[str, str, str]:
    others = {} if other is None else {"other": other_cluster(other)}
    asked = {"name": "small", "cluster": "other", **model}
    found = other_models_served(cluster(asked), others)
    assert found is not None
    return found.status, found.reason, found.message


@pytest.mark.parametrize(
    ("other", "model", "status", "reason", "words"),
    [
        (SMALL, {}, "True", "AsDeclared", ""),
        (SMALL, {"name": "sql"}, "True", "AsDeclared", ""),
        ({**SMALL, "status": ASLEEP}, {}, "True", "AsDeclared", ""),
        (None, {}, "False", "ClusterMissing", "there is no PDCluster other; make it in this"),
        (SMALL, {"name": "big"}, "False", "ModelNotServed", "other serves small, sql; correct"),
        (SMALL, {"port": 80}, "False", "ModelNotServed", "has port 8000, not 80; set port: 8000"),
        ({**SMALL, "status": {}}, {}, "False", "NotAnswering", "answers no requests now"),
        ({"spec": {"model": 1, "service": []}}, {}, "False", "ModelNotServed", "correct name"),
    ],
)
def test_condition_says_what_the_other_cluster_lacks(
    other: dict[str, Any] | None, model: dict[str, Any], status: str, reason: str, words: str
) -> None:
    found = condition_of(other, **model)

    assert found[:2] == (status, reason)
    assert words in found[2]


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ({}, {}, None),
        ({"apiKeySecret": "keys"}, {"apiKeySecret": "keys"}, None),
        ({"apiKeySecret": "keys"}, {}, None),
        ({"apiKeySecret": "keys"}, {"apiKeySecret": 1}, None),
        ({"apiKeySecret": "keys"}, {"apiKeySecret": "theirs"}, "this one those of Secret keys: "),
        ({}, {"apiKeySecret": "theirs"}, "this one needs none: "),
    ],
)
def test_other_api_keys_there_are_named_with_the_fix(
    here: dict[str, Any], there: dict[str, Any], words: str | None
) -> None:
    content = minimal()
    models = [{"name": "small", "cluster": "other"}]
    content["spec"]["service"] = {"models": models, **here}
    other = other_cluster({**SMALL, "spec": {**SMALL["spec"], "service": there}})

    found = other_models_served(parse(content), {"other": other})

    assert found is not None
    if words is None:
        assert found.status == "True"
        return
    assert (found.status, found.reason) == ("False", "ApiKeysDiffer")
    assert words in found.message
    assert "Secret theirs" in found.message
    assert found.message.endswith("; name one Secret in service.apiKeySecret of both")


def test_one_of_several_is_named_and_the_others_are_counted() -> None:
    asked = [{"name": name, "cluster": "other"} for name in ("small", "big", "huge")]

    found = other_models_served(cluster(*asked), {"other": other_cluster(SMALL)})

    assert found is not None
    assert "model big of service.models" in found.message
    assert found.message.endswith("(and 1 more)")


def test_there_is_no_condition_without_other_models() -> None:
    assert other_models_served(cluster(), {}) is None
