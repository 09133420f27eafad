"""`pdctl schema`: takes every example, and refuses what a typing error makes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from typer.testing import CliRunner

from pdcluster_schema.pdcluster import KIND
from pdctl.cli.main import app
from tests.schema.object_cases import at, minimal

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.fixture(scope="module")
def validator() -> jsonschema_rs.Draft4Validator:
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0
    return jsonschema_rs.Draft4Validator(json.loads(printed.stdout))


def test_every_example_is_taken(validator: jsonschema_rs.Draft4Validator) -> None:
    objects = [
        each
        for file in EXAMPLES.rglob("*.yaml")
        for each in yaml.safe_load_all(file.read_text())
        if each is not None and each.get("kind") == KIND
    ]
    assert len(objects) > 10
    for each in objects:
        assert not [error.message for error in validator.iter_errors(each)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (at("spec.routng", {}), "routng"),
        (at("spec.roles.decode.pools.0.replica", 1), "replica"),
        (at("spec.model.dtype", "fp16"), "fp16"),
        (at("status", {}), "status"),
        (at("kind", "PDClusters"), "PDClusters"),
    ],
)
def test_a_typing_error_is_named(
    change: Callable[[dict[str, Any]], None], words: str, validator: jsonschema_rs.Draft4Validator
) -> None:
    document = minimal()
    change(document)

    (error,) = validator.iter_errors(document)
    assert words in error.message
