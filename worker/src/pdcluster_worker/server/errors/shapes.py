"""Errors to answers in the shape of the API whose path was asked for: OpenAI's, but of
`/v1/messages` Anthropic's.
"""

from collections.abc import Mapping

from fastapi import Response
from starlette.types import Scope

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import anthropic as messages_errors
from pdcluster_worker.server.errors import openai as openai_errors

CONTEXT = "pdcluster.context"
"""Key of the `RequestContext` in a request's scope."""


def response(
    error: RequestError, scope: Scope, headers: Mapping[str, str] | None = None
) -> Response:
    """The whole answer."""
    if messages_errors.is_messages(scope["path"]):
        return messages_errors.response(
            error, getattr(scope.get(CONTEXT), "request_id", ""), headers
        )
    return openai_errors.response(error, headers)
