"""Requests whose constraint is being compiled: they wait here, before every queue, and hold no
seat.

Others go on meanwhile.  A request whose KV a peer writes waits for both at once.
"""

from pdcluster_worker.engine.ports import Grammars
from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.engine.scheduler.protocol import Scheduler
from pdcluster_worker.errors import RequestError


class GrammarQueue:
    """One per engine."""

    def __init__(self, grammars: Grammars, scheduler: Scheduler) -> None:
        self._grammars = grammars
        self._scheduler = scheduler
        self._waiting: dict[str, EngineRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: EngineRequest) -> None:
        """Begin to compile what the request is constrained by; one without a constraint does not
        wait.
        """
        if request.sampling.constraint is not None:
            self._grammars.begin(request)
            self._waiting[request.request_id] = request

    def enter(self, request: EngineRequest) -> None:
        """A new request waits for its grammar, if it has one, then for a seat."""
        self.add(request)
        self.queue(request)

    def queue(self, request: EngineRequest) -> None:
        """A request waits for a seat, unless it waits for its grammar still."""
        if request.request_id in self._waiting:
            return
        if request.block_table:  # with its KV in them
            self._scheduler.add_ready(request)
        else:
            self._scheduler.add(request)

    def remove(self, request: EngineRequest) -> None:
        """The request is over; unknown ones are a no-op."""
        self._waiting.pop(request.request_id, None)

    def settle(self) -> list[tuple[EngineRequest, RequestError | None]]:
        """Queue those that wait no longer, in the order in which they came; each with why it can
        never run, if so.

        One that receives its KV still is queued when that has come.
        """
        answers = [(request, self._grammars.open(request)) for request in self._waiting.values()]
        done = [
            (request, answer if isinstance(answer, RequestError) else None)
            for request, answer in answers
            if answer
        ]
        for request, _ in done:
            del self._waiting[request.request_id]
        for request, error in done:
            if error is None and request.status is not Status.RECEIVING:
                self.queue(request)
        return done
