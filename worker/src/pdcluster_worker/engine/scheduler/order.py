"""In which order requests are served, and what kind of work each has."""

from pdcluster_worker.engine.request import Request, Status


def num_uncomputed(request: Request) -> int:
    """Known tokens whose KV is still to be computed."""
    return len(request.tokens) - request.num_computed_tokens


def is_decode(request: Request) -> bool:
    """Whether the request is past its prefill: only its newest output token is uncomputed."""
    num_tokens = len(request.tokens)
    return num_tokens > request.num_prompt_tokens and num_tokens - request.num_computed_tokens == 1


def decodes_first(requests: list[Request]) -> list[Request]:
    """The same requests, decodes before unfinished prefills, each kind in its order."""
    decodes = [request for request in requests if is_decode(request)]
    if len(decodes) == len(requests):
        return decodes
    return [*decodes, *(request for request in requests if not is_decode(request))]


def running_order(request: Request) -> tuple[int, float]:
    """Who goes first among those with a seat: lower priority, then earlier arrival [V6]."""
    return request.priority, request.arrival_seconds


def waiting_order(request: Request) -> tuple[int, bool, float]:
    """Who is admitted first: a preempted request goes to the front of its priority [V5]."""
    return request.priority, request.status is not Status.PREEMPTED, request.arrival_seconds
