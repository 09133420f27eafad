"""Load sent from this ingress to each worker since the worker's last report.

A request counts its uncached prompt tokens until the first token, its KV blocks until it ends.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Charges:
    num_requests: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0

    def add(self, other: "Charges", sign: int = 1) -> None:
        self.num_requests += sign * other.num_requests
        self.prefill_tokens += sign * other.prefill_tokens
        self.decode_blocks += sign * other.decode_blocks


@dataclass(slots=True)
class _WorkerCharges:
    all: Charges = field(default_factory=Charges)
    since: Charges = field(default_factory=Charges)
    report: object = None


@dataclass(slots=True)
class _ChargedRequest:
    worker: str
    charges: Charges


class ActiveLoad:
    """One per ingress."""

    def __init__(self) -> None:
        self._requests: dict[str, _ChargedRequest] = {}
        self._sent: dict[str, _WorkerCharges] = defaultdict(_WorkerCharges)

    def add(self, request_id: str, worker: str, report: object, charges: Charges) -> None:
        """Charge a request to a worker; `report` is the worker's last one, compared by identity."""
        self.free(request_id)
        sent = self._sent[worker]
        _renew(sent, report)
        sent.all.add(charges)
        sent.since.add(charges)
        self._requests[request_id] = _ChargedRequest(worker, replace(charges))

    def prefilled(self, request_id: str) -> bool:
        """Return False for unknown ids and where no prompt token was charged."""
        request = self._requests.get(request_id)
        if request is None or not request.charges.prefill_tokens:
            return False
        paid = Charges(prefill_tokens=request.charges.prefill_tokens)
        self._take_away(request, paid)
        request.charges.add(paid, -1)
        return True

    def free(self, request_id: str) -> None:
        if (request := self._requests.pop(request_id, None)) is not None:
            self._take_away(request, request.charges)
            if not self._sent[request.worker].all.num_requests:
                del self._sent[request.worker]

    def num_requests(self, worker: str) -> int:
        return self._sent[worker].all.num_requests if worker in self._sent else 0

    def workers(self) -> Iterable[str]:
        return self._sent.keys()

    def potential(self, worker: str, report: object, reported: Charges) -> Charges:
        """The report plus what was sent since it; at least all that runs there from here."""
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
    if sent.report is not report:
        sent.report, sent.since = report, Charges()
