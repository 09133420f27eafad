"""Charges for requests that this ingress has sent to each worker, between the worker's own reports.

A request is charged when it is chosen for a worker: its prompt's uncached
tokens until the first token, its KV blocks until it ends.  A worker's load is
then what it reported and what was sent there since; never less than all that
runs there from here.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Charges:
    """Requests on a worker, prompt tokens that wait there to be computed, and KV blocks in use."""

    num_requests: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0

    def add(self, other: "Charges", sign: int = 1) -> None:
        """Add another one's, or take them away."""
        self.num_requests += sign * other.num_requests
        self.prefill_tokens += sign * other.prefill_tokens
        self.decode_blocks += sign * other.decode_blocks


@dataclass(slots=True)
class _WorkerCharges:
    """Charges at one worker: all, and those since its last report."""

    all: Charges = field(default_factory=Charges)
    since: Charges = field(default_factory=Charges)
    report: object = None


@dataclass(slots=True)
class _ChargedRequest:
    worker: str
    charges: Charges


class ActiveLoad:
    """One per ingress: AddRequest, MarkPrefillCompleted and Free are `add`, `prefilled` and `free`.

    >>> load, report = ActiveLoad(), object()
    >>> load.add("r", "d0", report, Charges(1, prefill_tokens=100, decode_blocks=7))
    >>> load.prefilled("r")
    True
    >>> load.potential("d0", report, reported=Charges(2, 50, 10))
    Charges(num_requests=3, prefill_tokens=50, decode_blocks=17)
    >>> load.potential("d0", object(),
    ...     reported=Charges())  # a newer report, which does not know it yet
    Charges(num_requests=1, prefill_tokens=0, decode_blocks=7)
    >>> load.free("r")
    >>> load.potential("d0", report, reported=Charges(2, 50, 10))
    Charges(num_requests=2, prefill_tokens=50, decode_blocks=10)
    """

    def __init__(self) -> None:
        self._requests: dict[str, _ChargedRequest] = {}
        self._sent: dict[str, _WorkerCharges] = defaultdict(_WorkerCharges)

    def add(self, request_id: str, worker: str, report: object, charges: Charges) -> None:
        """A request goes to a worker; one that was elsewhere moves.  report: the worker's last one,
        by identity.
        """
        self.free(request_id)
        sent = self._sent[worker]
        _renew(sent, report)
        sent.all.add(charges)
        sent.since.add(charges)
        self._requests[request_id] = _ChargedRequest(worker, replace(charges))

    def prefilled(self, request_id: str) -> bool:
        """A token came, so none of its prompt waits any more.

        False where none did before, and for unknown ids.
        """
        request = self._requests.get(request_id)
        if request is None or not request.charges.prefill_tokens:
            return False
        paid = Charges(prefill_tokens=request.charges.prefill_tokens)
        self._take_away(request, paid)
        request.charges.add(paid, -1)
        return True

    def free(self, request_id: str) -> None:
        """Remove the charges of an ended request; unknown ids are a no-op."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._take_away(request, request.charges)
            if not self._sent[request.worker].all.num_requests:
                del self._sent[request.worker]

    def num_requests(self, worker: str) -> int:
        """Requests from here that run on a worker."""
        return self._sent[worker].all.num_requests if worker in self._sent else 0

    def workers(self) -> Iterable[str]:
        """Those on which requests from here run."""
        return self._sent.keys()

    def potential(self, worker: str, report: object, reported: Charges) -> Charges:
        """A worker's load: as reported and what was sent since, or all that was sent from here if
        that is more.
        """
        if (sent := self._sent.get(worker)) is None:
            return reported
        _renew(sent, report)
        return Charges(
            num_requests=max(
                reported.num_requests + sent.since.num_requests, sent.all.num_requests
            ),
            prefill_tokens=max(
                reported.prefill_tokens + sent.since.prefill_tokens, sent.all.prefill_tokens
            ),
            decode_blocks=max(
                reported.decode_blocks + sent.since.decode_blocks, sent.all.decode_blocks
            ),
        )

    def _take_away(self, request: _ChargedRequest, charges: Charges) -> None:
        sent = self._sent[request.worker]
        sent.all.add(charges, -1)
        sent.since.add(charges, -1)  # below 0 for one that the report still counts


def _renew(sent: _WorkerCharges, report: object) -> None:
    """Start the count again at a newer report."""
    if sent.report is not report:
        sent.report, sent.since = report, Charges()
