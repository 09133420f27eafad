"""Errors about any field of any request name the field and what it must be, and nothing of the
library that found them.
"""

import re
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from pdcluster_worker.server.anthropic.schemas import MessagesRequest
from pdcluster_worker.server.http.json_body import from_validation
from pdcluster_worker.server.openai.tokenize_route import DetokenizeRequest, TokenizeChat
from pdcluster_worker.server.responses.schemas import ResponsesRequest
from pdcluster_worker.server.schemas.requests import ChatRequest, CompletionRequest

REQUESTS = (
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeChat,
    DetokenizeRequest,
)
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": 3}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": 3}
WRONG: list[Any] = [
    *(3, 3.5, "x", True, [], [3], ["x"], {}, {"a": 3}, [{}], [[]]),
    *({"type": "x"}, {"type": "json_schema", "json_schema": {"schema": 3}}),
    *({"json": 3}, {"format": 3}, {"prefill": 3}, {"type": "tool", "name": 3}),
    *([{"type": "function"}], [{"type": "function", "function": {"name": 3}}], [OUTPUT]),
    [{"role": "user", "content": 3}],
    [{"role": "user", "content": [RESULT]}],
    [{"role": "user", "content": [{**RESULT, "content": [{"type": "x"}]}]}],
    [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": 3}]}],
]
LIBRARY = re.compile(r"function-|\w\[[a-z_]+|instance of|validator|[<>]|None")


@pytest.mark.parametrize("model", REQUESTS, ids=lambda model: model.__name__)
def test_no_error_names_a_type_of_the_library(model: type[BaseModel]) -> None:
    num_errors = 0
    for name, field in model.model_fields.items():
        for value in WRONG:
            body = {field.alias or name: value}
            try:
                model.model_validate(body)
            except ValidationError as e:
                # those of the field alone, not of the ones that are missing
                found = [x for x in e.errors(include_url=False) if x["loc"][0] in body]
                if not found:
                    continue
                error = from_validation(found, body)
                num_errors += 1
                assert LIBRARY.search(error.message) is None, error.message
                assert error.message.startswith(f"{error.param}: ")
    assert num_errors > len(WRONG)
