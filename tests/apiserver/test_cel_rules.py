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
from tests.apiserver.cel_cases import RULES, Rule
from tests.apiserver.objects import Objects
from tests.schema.object_cases import minimal

CRD = yaml.safe_load((Path(__file__).parents[2] / "crds" / "pdcluster.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
STANDING = [rule for rule in RULES if rule.before is None]
ABOUT_CHANGES = [rule for rule in RULES if rule.before is not None]


def rules_below(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Place of each rule of a schema, and its message."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield (path + rule.get("fieldPath", "")).removeprefix("."), rule["message"]
    for name, child in schema.get("properties", {}).items():
        yield from rules_below(child, f"{path}.{name}")
    for key, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(key), dict):
            yield from rules_below(schema[key], path + suffix)


def name_of(rule: Rule) -> str:
    return f"{rule.field}: {rule.message[:40]}"


def says(rule: Rule, field: str, message: str) -> bool:
    """Return whether a cause is this rule's, with any index or key in its place."""
    place = re.escape(rule.field).replace(r"\[\]", r"\[\d+\]").replace(r"\{\}", r"\[\w+\]")
    return re.fullmatch(place, field) is not None and message.endswith(rule.message)


def test_every_rule_has_a_case() -> None:
    found = set(rules_below(SCHEMA))
    # A router has neither an engine nor accelerators: what is said of those cannot be shown.
    hidden = ("spec.roles.router.engine.", "spec.roles.router.pools[].gpusPerReplica")
    shown = {(field, said) for field, said in found if not field.startswith(hidden)}
    assert {(rule.field, rule.message) for rule in RULES} == shown


@pytest.mark.parametrize("rule", STANDING, ids=name_of)
def test_rule_accepts(rule: Rule, dry_clusters: Objects) -> None:
    document = minimal()
    rule.right(document)
    answer = dry_clusters.create(document, dry_run=True)

    assert answer.accepted, answer.causes
    assert parse_applied(document)


@pytest.mark.parametrize("rule", STANDING, ids=name_of)
def test_rule_refuses(rule: Rule, dry_clusters: Objects) -> None:
    document = minimal()
    rule.wrong(document)
    answer = dry_clusters.create(document, dry_run=True)

    assert answer.code == 422
    assert any(says(rule, *cause) for cause in answer.causes), answer.causes
    with pytest.raises(InvalidObjectError):
        parse_applied(document)


@pytest.mark.parametrize("rule", ABOUT_CHANGES, ids=name_of)
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
    assert sum(says(rule, *cause) for cause in answer.causes) == 1, answer.causes
    right = clusters.get("chat")
    rule.right(right)
    answer = clusters.replace(right, dry_run=True)
    assert answer.accepted, answer.causes
    assert parse_applied(answer.content)
