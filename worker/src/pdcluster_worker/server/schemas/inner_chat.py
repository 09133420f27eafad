"""Chat requests that other APIs are served by: they are checked as those of clients are."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pdcluster_worker.server.errors import openai as openai_errors
from pdcluster_worker.server.schemas.requests import ChatRequest


def checked_chat(fields: dict[str, Any], names: Mapping[str, str] | None = None) -> ChatRequest:
    """The request with these fields.  Raises RequestError in the words of chat.

    names: chat's fields that the client has under another name, which the error
           gives; the place within such a field is left out, for it is chat's.
    """
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as e:
        found = [
            {**error, "loc": ("body", *_place(error["loc"], names or {}))}
            for error in e.errors(include_url=False)
        ]
        raise openai_errors.from_validation(found) from e


def _place(path: tuple[int | str, ...], names: Mapping[str, str]) -> tuple[int | str, ...]:
    name = names.get(str(path[0])) if path else None
    return path if name is None else (name,)
