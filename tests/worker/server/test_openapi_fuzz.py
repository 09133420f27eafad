"""Schemathesis on the document that the application itself publishes: no 5xx, and every answer as
documented.

One application for all: its document takes half a second to make and to read.
"""

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.worker.server.conftest import make_rig

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
POSTS = ["/v1/chat/completions", "/v1/completions"]
OTHER_POSTS = [
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/embeddings",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
]
KEPT = {
    ("/v1/responses/{response_id}", "GET"),
    ("/v1/responses/{response_id}", "DELETE"),
    ("/v1/responses/{response_id}/input_items", "GET"),
    ("/v1/responses/{response_id}/cancel", "POST"),
}
GETS = [
    "/v1/models",
    "/debug/cluster",
    "/v1/models/{model}",
    "/health",
    "/ready",
    "/metrics",
    "/version",
]
BOUNDED = settings(
    max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
FEW = settings(BOUNDED, max_examples=10)


@pytest.fixture(scope="module")
def document(model_folder: Path) -> Any:
    """Document that the application publishes."""
    return schemathesis.openapi.from_asgi("/openapi.json", make_rig(model_folder).app)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", [*POSTS, *OTHER_POSTS])
def test_no_body_makes_the_api_fail(document, path, mode):
    operation = document[path]["POST"]

    @given(case=operation.as_strategy(generation_mode=mode))
    @(BOUNDED if path in POSTS else FEW)
    def check(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"  # any other name is a 404, and goes no further
        case.call_and_validate(checks=CHECKS)

    check()


@pytest.mark.parametrize(("path", "method"), [*((path, "GET") for path in GETS), *sorted(KEPT)])
def test_no_path_makes_the_api_fail(document, path, method):
    @given(case=document[path][method].as_strategy())
    @FEW
    def check(case):
        case.call_and_validate(checks=CHECKS)

    check()


def test_every_operation_is_fuzzed(document):
    operations = {
        (result.ok().path, result.ok().method.upper()) for result in document.get_all_operations()
    }

    assert (
        operations
        == {(path, "POST") for path in [*POSTS, *OTHER_POSTS]}
        | {(path, "GET") for path in GETS}
        | KEPT
    )
