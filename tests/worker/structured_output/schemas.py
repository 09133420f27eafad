"""JSON schemas as constraints, and the texts that a constraint takes."""

import json
from typing import Any

from pdcluster_worker.messages.constraint import Constraint
from pdcluster_worker.structured_output.native import library
from tests.worker.structured_output.conftest import END


def of_schema(schema: Any, *, strict: bool = False) -> Constraint:
    """As the server makes it."""
    return Constraint("json_schema", json.dumps(schema), strict=strict)


def takes(forms: Any, constraint: Constraint, text: str) -> bool:
    """Return whether the text is a whole answer under the constraint."""
    matcher = library().GrammarMatcher(forms.compile(constraint).compiled, [END], False, -1, None)
    return all(
        matcher.accept_token(byte, False) for byte in text.encode()
    ) and matcher.accept_token(END, False)
