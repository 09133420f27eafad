"""Chat requests that other APIs are served by: they are checked as those of clients are."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors.validation import from_validation
from pdcluster_worker.server.schemas.requests import ChatRequest

_FIELD_END = re.compile(r"[.\[]")


@dataclass(frozen=True, slots=True)
class Names:
    """Names that the client of an API knows for chat's fields.

    fields: of whole fields; the place within such a field is left out, for it is chat's.
    parts:  of parts of the paths within others; the first that is found counts.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)

    def of(self, param: str) -> str:
        """Translate the path of a field.

        >>> names = Names({"response_format": "text.format"}, {".function": ""})
        >>> names.of("response_format.json_schema.schema"), names.of("tools[0].function.name")
        ('text.format', 'tools[0].name')
        """
        name = self.fields.get(_FIELD_END.split(param, maxsplit=1)[0])
        if name is not None:
            return name
        part = next((part for part in self.parts if part in param), None)
        return param if part is None else param.replace(part, self.parts[part], 1)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Translate the field that a RequestError of the block names."""
        try:
            yield
        except RequestError as e:
            if e.param is not None:
                name = self.of(e.param)
                e.message, e.param = e.message.replace(e.param, name, 1), name
            raise


CHAT_NAMES = Names()
"""Names of chat itself."""


def checked_chat(fields: dict[str, Any]) -> ChatRequest:
    """The request with these fields.  Raises RequestError in the words of chat."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as e:
        raise from_validation(e.errors(include_url=False), fields) from e
