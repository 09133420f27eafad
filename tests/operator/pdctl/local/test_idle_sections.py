"""Sections that have an effect on Kubernetes alone are edited without a restart.

What `pdctl up` says of each is in tests/golden/operator.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_schema.load import parse
from pdctl.local.ineffective import ineffective_remarks
from pdctl.local.policy import restart_fields
from tests.schema.object_cases import at, vllm

CASES = yaml.safe_load(
    (Path(__file__).parents[3] / "golden" / "operator" / "ineffective.yaml").read_text()
)


@pytest.mark.parametrize("change", CASES, ids=lambda change: " ".join(change))
def test_an_edit_of_it_needs_no_restart(change: dict[str, Any], document: dict[str, Any]) -> None:
    """But of the model, whose folder was found by all of it, and of the port."""
    changed = [path for path in ("spec.model", "spec.service.port") if path in change]
    if "spec.engine.type" in change:
        at("spec.engine.type", "vllm")(document)
    if "spec.roles.router" in change:
        at("spec.roles.router.pools", change["spec.roles.router"]["pools"])(document)
    before = parse(document)
    for path, value in change.items():
        at(path, value)(document)

    assert bool(restart_fields(before, parse(document))) is bool(changed)


def test_a_time_to_start_counts_for_stock_engines_alone(document: dict[str, Any]) -> None:
    at("spec.roles.decode.startupTimeoutSeconds", 60)(document)

    assert ineffective_remarks(parse(document)) == [
        "spec.roles.decode.startupTimeoutSeconds has no effect here: a worker without a stock "
        "engine may take any time to start"
    ]
    vllm()(document)
    assert "startupTimeoutSeconds" not in " ".join(ineffective_remarks(parse(document)))
