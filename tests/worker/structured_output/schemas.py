"""JSON schemas as constraints, and the texts that a constraint takes."""

import json
from collections.abc import Sequence
from typing import Any

from pdcluster_worker.messages.requests import Constraint
from pdcluster_worker.structured_output.matcher import Matcher, OutsideError
from tests.worker.structured_output.conftest import END


def of_schema(schema: Any, *, strict: bool = False) -> Constraint:
    """As the server makes it."""
    return Constraint("json_schema", json.dumps(schema), strict=strict)


def takes(forms: Any, constraint: Constraint, text: str) -> bool:
    """Return whether the text is a whole answer under the constraint."""
    return goes_on(Matcher(forms.compile(constraint), [END]), [*text.encode(), END])


def goes_on(matcher: Matcher, token_ids: Sequence[int]) -> bool:
    """Feed tokens; return whether the form has them."""
    try:
        matcher.feed(token_ids)
    except OutsideError:
        return False
    return True
