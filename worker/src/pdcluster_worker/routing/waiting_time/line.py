"""The order of the waiting line: priority, then the earliest deadline (EDF), then arrival; the engine's is the same."""

from pdcluster_worker.routing.estimator import Flight, Line


def ahead_of(flight: Flight, line: Line) -> list[Flight]:
    """Those of the line without a first token that are served before a request which comes now, first to be served first."""
    place = (flight.priority, flight.due_seconds)
    ahead = [other for other in line.flights if not other.is_decoding and (other.priority, other.due_seconds) <= place]
    return sorted(ahead, key=lambda other: (other.priority, other.due_seconds))
