"""The end of a request: a log line, and an event of its trace.  Numbers and names, no text of
users.
"""

import logging
from dataclasses import dataclass

from pdcluster_schema.log_lines import log_fields
from pdcluster_worker.messages.peers import Fact
from pdcluster_worker.server.generation.generation import Generation
from pdcluster_worker.tracing.request_trace import ENDED, add_event, places

logger = logging.getLogger(__name__)

CANCELLED = "cancelled"
"""End of a generation that lost its race to another model, or whose client left the race."""


@dataclass(frozen=True, slots=True)
class RequestNames:
    """request: as in x-request-id.  label: the client's own id.  operation: as OpenTelemetry
    names it.
    """

    request: str
    response: str
    label: str
    operation: str


def note_end(generation: Generation, names: RequestNames, failure: str | None) -> None:
    """failure: why it has no whole answer; None where it has.  CANCELLED is no error."""
    facts: dict[str, Fact] = {**generation.figures(), **places(generation.prefill)}
    facts["reason"] = failure or generation.finish_reasons()
    error: dict[str, Fact] = {} if failure in (None, CANCELLED) else {"error": failure}
    add_event(ENDED, response=names.response, operation=names.operation, **facts, **error)
    log_fields(logger, "ended", {"request": names.response, "label": names.label, **facts})
