"""Requests whose constraint is being compiled; they hold no slot, and others go on."""

from pdcluster_worker.engine.ports import Grammars
from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.engine.scheduler import Scheduler
from pdcluster_worker.errors import RequestError


class GrammarQueue:
    """One per engine.  waiting: by request id."""

    def __init__(self, grammars: Grammars, scheduler: Scheduler) -> None:
        self.grammars = grammars
        self._scheduler = scheduler
        self.waiting: dict[str, EngineRequest] = {}

    def add(self, request: EngineRequest) -> None:
        """Begin to compile the request's constraint, if it has one."""
        if request.sampling.constraint is not None:
            self.grammars.begin(request)
            self.waiting[request.request_id] = request

    def enter(self, request: EngineRequest) -> None:
        self.add(request)
        self.queue(request)

    def queue(self, request: EngineRequest) -> None:
        """A request waits for a slot, unless it waits for its grammar still."""
        if request.request_id in self.waiting:
            return
        if request.block_table:  # with its KV in them
            self._scheduler.add_ready(request)
        else:
            self._scheduler.add(request)

    def settle(self) -> list[tuple[EngineRequest, RequestError | None]]:
        """Queue those whose grammar is done, unless KV is still received; each with its error."""
        answers = [(request, self.grammars.open(request)) for request in self.waiting.values()]
        done = [
            (request, answer if isinstance(answer, RequestError) else None)
            for request, answer in answers
            if answer
        ]
        for request, _ in done:
            del self.waiting[request.request_id]
        for request, error in done:
            if error is None and request.status is not Status.RECEIVING:
                self.queue(request)
        return done
