"""In which order requests are served, and what kind of work each has."""

from collections.abc import Callable
from dataclasses import dataclass

from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.messages.engine_settings import SchedulingPolicy


def num_uncomputed(request: EngineRequest) -> int:
    """Tokens that the next step can compute: those known by then, less those computed by then."""
    return request.num_planned_tokens - request.num_scheduled_tokens


def is_decode(request: EngineRequest) -> bool:
    """Return whether the request is past its prefill: only its newest output token is
    uncomputed.
    """
    return request.num_planned_tokens > request.num_prompt_tokens and num_uncomputed(request) == 1


def by_kind(requests: list[EngineRequest]) -> tuple[list[EngineRequest], list[EngineRequest]]:
    """The decodes and the unfinished prefills, each in the order of `requests`."""
    decodes = [request for request in requests if is_decode(request)]
    if len(decodes) == len(requests):
        return decodes, []
    return decodes, [request for request in requests if not is_decode(request)]


@dataclass(frozen=True, slots=True)
class Order:
    """Sort keys; the least goes first.

    running: of requests that hold blocks; the last of them is the victim of a preemption.
    waiting: of the others; a preempted request goes to the front of its equals, and of the same
             priority the earliest deadline goes first (EDF).
    """

    running: Callable[[EngineRequest], tuple[float, ...]]
    waiting: Callable[[EngineRequest], tuple[float, ...]]


def order_of(policy: SchedulingPolicy) -> Order:
    """The order of one policy."""
    return _ORDERS[policy]


def _never_ran(request: EngineRequest) -> bool:
    return request.status is not Status.PREEMPTED


_BY_PRIORITY = Order(
    running=lambda request: (request.priority, request.arrival_seconds),
    waiting=lambda request: (
        request.priority,
        _never_ran(request),
        request.due_seconds,
        request.arrival_seconds,
    ),
)
_ORDERS = {
    "fcfs": Order(
        running=lambda request: (request.arrival_seconds,),
        waiting=lambda request: (_never_ran(request), request.arrival_seconds),
    ),
    "priority": _BY_PRIORITY,
    "preemptive": _BY_PRIORITY,
}
