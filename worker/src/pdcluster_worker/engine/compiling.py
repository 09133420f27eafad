"""Requests whose constraint is being compiled: they wait here, before every queue, and hold no seat [V31].

Others go on meanwhile.  A request whose KV a peer writes waits for both at once.
"""

from pdcluster_worker.engine.ports import Grammars
from pdcluster_worker.engine.request import Request
from pdcluster_worker.errors import RequestError


class Compiling:
    """One per engine."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._waiting

    def add(self, request: Request) -> None:
        """Begin to compile what the request is constrained by; one without a constraint does not wait."""
        if request.sampling.constraint is not None:
            self._grammars.begin(request)
            self._waiting[request.request_id] = request

    def remove(self, request: Request) -> None:
        """The request is over; unknown ones are a no-op."""
        self._waiting.pop(request.request_id, None)

    def settled(self) -> list[tuple[Request, RequestError | None]]:
        """Those that wait no longer, in the order in which they came; each with why it can never run, if so."""
        answers = [(request, self._grammars.open(request)) for request in self._waiting.values()]
        done = [(request, answer if isinstance(answer, RequestError) else None) for request, answer in answers if answer]
        for request, _ in done:
            del self._waiting[request.request_id]
        return done
