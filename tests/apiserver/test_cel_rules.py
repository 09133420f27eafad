"""Every CEL rule of the PDCluster CRD on a real API server: what it lets through, what it refuses,
where and in which words.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse_applied
from tests.apiserver.cel_cases import ACCEPTED, RULES, Rule
from tests.apiserver.objects import Answer, Objects
from tests.schema.object_cases import minimal
from tests.schema.wrong_objects import BAD

CRD = yaml.safe_load((Path(__file__).parents[2] / "crds" / "pdcluster.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
STANDING = [rule for rule in RULES if not isinstance(rule, Rule)]
ABOUT_CHANGES = [rule for rule in RULES if isinstance(rule, Rule)]


def rules_below(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Place of each rule of a schema, and its message."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield (path + rule.get("fieldPath", "")).removeprefix("."), rule["message"]
    for name, child in schema.get("properties", {}).items():
        yield from rules_below(child, f"{path}.{name}")
    for key, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield from rules_below(schema[key], path + suffix)


def says(rule: tuple[str, str], field: str, message: str) -> bool:
    """Return whether a cause is this rule's, with any index or key in its place."""
    place = re.escape(rule[0]).replace(r"\[\]", r"\[\d+\]").replace(r"\{\}", r"\[\w+\]")
    return re.fullmatch(place, field) is not None and message.endswith(rule[1])


def test_every_rule_refuses_an_object_that_the_model_refuses(dry_clusters: Objects) -> None:
    """Each where the model says it, and no rule is without such an object."""
    changes = [(wrong.change, wrong.field) for wrong in BAD if wrong.field is not None]
    changes += [(refused, None) for _, refused in STANDING]
    causes, missed = set[tuple[str, str]](), []
    for change, field in changes:
        document = minimal()
        change(document)
        with pytest.raises(InvalidObjectError):
            parse_applied(document)
        answer = dry_clusters.create(document, dry_run=True)
        causes.update(answer.causes)
        if answer.accepted or not names(answer, field):
            missed.append((field, answer.content.get("message")))
    assert missed == []
    # A router has neither an engine nor accelerators: what is said of those cannot be shown.
    hidden = tuple(
        f"spec.roles.{role}.{field}"
        for role in ("router", "picker")
        for field in ("engine.", "pools[].gpusPerReplica", "resourceClaims[]")
    )
    shown = {rule for rule in rules_below(SCHEMA) if not rule[0].startswith(hidden)}
    about_changes = {(rule.field, rule.message) for rule in ABOUT_CHANGES}
    assert {
        rule for rule in shown - about_changes if not any(says(rule, *c) for c in causes)
    } == set()
    assert about_changes <= shown


def names(answer: Answer, field: str | None) -> bool:
    fields = {cause for cause, _ in answer.causes}
    return field is None or field in fields or f'"{field}"' in answer.content["message"]


def test_every_rule_lets_through_what_it_should(dry_clusters: Objects) -> None:
    for change in (*ACCEPTED, *(right for right, _ in STANDING)):
        document = minimal()
        change(document)
        answer = dry_clusters.create(document, dry_run=True)
        assert answer.accepted, answer.causes
        assert parse_applied(document)


@pytest.mark.parametrize("rule", ABOUT_CHANGES, ids=lambda rule: rule.field)
def test_rule_about_changes(rule: Rule, clusters: Objects) -> None:
    before = minimal()
    assert rule.before is not None
    rule.before(before)
    created = clusters.create(before)
    assert created.accepted, created.causes

    wrong = clusters.get("chat")
    rule.wrong(wrong)
    answer = clusters.replace(wrong, dry_run=True)
    assert answer.code == 422
    assert sum(says((rule.field, rule.message), *cause) for cause in answer.causes) == 1, (
        answer.causes
    )
    right = clusters.get("chat")
    rule.right(right)
    answer = clusters.replace(right, dry_run=True)
    assert answer.accepted, answer.causes
    assert parse_applied(answer.content)
