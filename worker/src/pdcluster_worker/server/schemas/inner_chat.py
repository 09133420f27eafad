"""Chat requests that other APIs are served by: they are checked as those of clients are."""

from typing import Any

from pydantic import ValidationError

from pdcluster_worker.server.errors import openai as openai_errors
from pdcluster_worker.server.schemas.requests import ChatRequest


def checked_chat(fields: dict[str, Any]) -> ChatRequest:
    """The request with these fields.  Raises RequestError in the words of chat, naming chat's field."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as e:
        found = [{**error, "loc": ("body", *error["loc"])} for error in e.errors(include_url=False)]
        raise openai_errors.from_validation(found) from e
