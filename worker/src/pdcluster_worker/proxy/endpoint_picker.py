"""The choice of a worker for a request whose bytes a gateway moves, as an endpoint picker of the
Gateway API Inference Extension makes it (proposal 004).  Without I/O: the server is in `processes`.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.errors import RequestError
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.proxy import ext_proc_messages as messages
from pdcluster_worker.proxy.picker import Candidate, Picker, UpstreamState, affinity_of
from pdcluster_worker.server.errors import openai_error
from pdcluster_worker.server.http.limits import limits_of

POLL_SECONDS = 0.5
CHARGE_SECONDS = 1.5
"""Time for which a request counts where it was sent: then a report of that worker, and a poll, have
it, or it has ended.  The gateway is not asked when it ends, which would take the bytes of every
answer through here.
"""

_BUFFERED = (messages.BODY_BUFFERED, messages.BODY_BUFFERED_PARTIAL)


class Endpoint(Candidate):
    def __init__(self, pod: str, address: str) -> None:
        super().__init__(pod)
        self.address = address


class EndpointPicker:
    """One per picker process.  workers: decode and mixed workers now.  refusal: what a request is
    answered while none takes it.
    """

    def __init__(
        self,
        policy: Callable[[], PolicyConfig],
        refusal: Callable[[], RequestError],
        metrics: Metrics,
    ) -> None:
        self.workers: Callable[[], Sequence[UpstreamState]] = lambda: ()
        self.picker: Picker[Endpoint] = Picker()
        self.num_held_bytes = 0
        self.refusal = refusal
        self._policy = policy
        self._endpoints: dict[str, Endpoint] = {}
        metrics.picker_endpoints.set_function(lambda: len(self.picker.members))
        self._counts = {
            outcome: metrics.picked_requests.labels(outcome) for outcome in ("picked", "refused")
        }

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.poll()

    def poll(self) -> None:
        found = {worker.key: worker for worker in self.workers()}
        self._endpoints = {
            key: self._endpoints.get(key) or Endpoint(worker.pod, worker.address)
            for key, worker in found.items()
        }
        self.picker.follow(self._endpoints, found)

    def close(self) -> None:
        self.picker.set([])

    @property
    def max_held_bytes(self) -> int:
        """Bytes of one body to wait for, and fewer where all that wait hold many."""
        policy = self._policy()
        left = limits_of(policy.http_limits).max_bodies_bytes - self.num_held_bytes
        return min(policy.admission.max_body_bytes, left)

    @property
    def stream_seconds(self) -> float:
        """Time for one request of a gateway, whose client may send its body slowly."""
        policy = self._policy()
        return limits_of(policy.http_limits).body_deadline(policy.admission.max_body_bytes)

    def choose(self, body: bytes, subset: frozenset[str] | None) -> Endpoint | None:
        """subset: addresses that the gateway takes; None = all."""
        policy = self._policy()
        affinity = affinity_of(policy.relaying, policy.decode_score, body)
        others = {
            each
            for each in self.picker.members
            if subset is not None and each.address not in subset
        }
        found = self.picker.choose(policy.relaying, policy.decode_score, affinity, others)
        self._counts["refused" if found is None else "picked"].inc()
        if found is not None:
            self.picker.begin(found)
            asyncio.get_running_loop().call_later(CHARGE_SECONDS, self._discharge, found)
        return found

    def _discharge(self, endpoint: Endpoint) -> None:
        self.picker.end(endpoint)
        self.picker.report(endpoint, endpoint.reported)


class Exchange:
    """One request of a gateway.  has_ended: all is said; the gateway goes on by itself once the
    stream is closed.
    """

    def __init__(self, picker: EndpointPicker) -> None:
        self.has_ended = False
        self._picker = picker
        self._is_chosen = False
        self._subset: frozenset[str] | None = None
        self._mode = messages.BODY_DUPLEX
        self._held: bytearray | None = None  # of the body, until the choice

    def take(self, message: bytes) -> list[bytes]:
        """Answers to one message.  Raises ValueError for one that cannot be read."""
        request = messages.parse_request(message)
        if request.HasField("request_headers"):
            return self._take_head(request)
        if request.HasField("request_body"):
            return self._take_body(request.request_body)
        if request.HasField("request_trailers"):
            answers = [] if self._is_chosen else self._choose("request_headers")
            self.has_ended = True
            return [*answers, messages.TRAILERS] if self._is_chosen else answers
        raise ValueError("neither headers, body nor trailers of a request")

    def _take_head(self, request: Any) -> list[bytes]:
        self._subset = messages.subset_of(request)
        if request.HasField("protocol_config"):
            self._mode = request.protocol_config.request_body_mode
        if not request.request_headers.end_of_stream:
            if self._mode in _BUFFERED:
                return [messages.HEADERS]  # the body comes after this
            if self._mode == messages.BODY_DUPLEX:
                return []
        self.has_ended = True
        return self._choose("request_headers")

    def _take_body(self, part: Any) -> list[bytes]:
        self.has_ended = part.end_of_stream
        if self._is_chosen:
            return [messages.echo(part.body, is_end=part.end_of_stream)]
        num_held = self._hold(part.body)
        if self._mode in _BUFFERED:
            self.has_ended = True
            return self._choose("request_body")
        is_enough = self.has_ended or num_held >= self._picker.max_held_bytes
        return self._choose("request_headers") if is_enough else []

    def _choose(self, phase: str) -> list[bytes]:
        """The answer to this phase, and what of the body has waited for it."""
        held = None if self._held is None else bytes(self._held)
        self.close()
        endpoint = self._picker.choose(held or b"", self._subset)
        if endpoint is None:
            self.has_ended = True
            return [_refused(self._picker.refusal())]
        self._is_chosen = True
        answers = [messages.chosen(phase, endpoint.address)]
        if held is not None and self._mode == messages.BODY_DUPLEX:
            answers += messages.echoes(held, is_end=self.has_ended)
        return answers

    def _hold(self, body: bytes) -> int:
        """Its bytes alone, whatever else is in the message that they came in."""
        held = self._held = bytearray() if self._held is None else self._held
        held += body
        self._picker.num_held_bytes += len(body)
        return len(held)

    def close(self) -> None:
        """Let go what is held."""
        self._picker.num_held_bytes -= len(self._held or ())
        self._held = None


def _refused(error: RequestError) -> bytes:
    headers = {"content-type": "application/json"}
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(error.retry_after_seconds)
    body = openai_error(error).model_dump_json().encode()
    return messages.refusal(error.status, headers, body, error.code or "")
