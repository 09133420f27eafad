"""State of disaggregation in a worker's record, and the moments at which it is written."""

from collections.abc import Callable, Mapping
from math import floor, inf, log10

from msgspec.structs import replace

from pdcluster_schema.text import shortened
from pdcluster_worker.peers.records import DisaggregationRecord, RefusedPeer
from pdcluster_worker.routing.prefill_choice import RemoteRatio

POLL_SECONDS = 5.0
"""Seconds between two looks, and so between two writes of refused pairs: many that come at once are
one write.
"""

FIGURES_SECONDS = 30.0

MAX_REFUSED = 8
"""Peers named in a record; the number of all is beside them."""

MAX_REASON = 400
"""Characters of one reason: a record is read by every worker."""

_STEP = 0.05
"""Step to which the share of remote prefills is rounded."""

_SAME = 0.25
"""A number that differs by no more than this part of the one stated is not written again."""


class DisaggregationStats:
    """One per worker.

    transport: that moved the last KV, and why not the one that was asked for.
    refused:   reason by pod of the prefill workers that may not be used.
    """

    def __init__(
        self,
        transport: Callable[[], tuple[str, str]],
        share: RemoteRatio,
        refused: Callable[[], Mapping[str, str]],
        bytes_per_second: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.stated = DisaggregationRecord(transport()[0])
        self._transport = transport
        self._share, self._refused, self._clock = share, refused, clock
        self._bytes_per_second = bytes_per_second
        self._figures_at = -inf

    def poll(self) -> bool:
        """Bring `stated` up to date; True when it says something new."""
        before, reasons = self.stated, self._refused()
        refused = [RefusedPeer(pod, shortened(reasons[pod], MAX_REASON)) for pod in sorted(reasons)]
        self.stated = replace(
            self._figures(), refused=refused[:MAX_REFUSED], num_refused=len(refused)
        )
        return self.stated != before

    def _figures(self) -> DisaggregationRecord:
        """The record with new figures, or as stated until the next update."""
        stated, share, now = self.stated, self._share, self._clock()
        transport, note = self._transport()
        new = replace(
            stated,
            transport=transport,
            transport_note=shortened(note, MAX_REASON),
            long_prompts=steady(stated.long_prompts, share.num_long),
            remote_ratio=remote_ratio(share.num_long, share.num_remote, stated.remote_ratio),
            bytes_per_second=steady(stated.bytes_per_second, self._bytes_per_second()),
        )
        if new == stated or now - self._figures_at < FIGURES_SECONDS:
            return stated
        self._figures_at = now
        return new


def remote_ratio(num_long: int, num_remote: int, stated: float | None = None) -> float | None:
    """The share in steps; 0 and 1 only where it is none and all, None without a prompt; as stated
    while it is about that.

    >>> remote_ratio(0, 0), remote_ratio(9, 9), remote_ratio(1000, 999), remote_ratio(1000, 1)
    (None, 1.0, 0.95, 0.05)
    >>> remote_ratio(100, 93), remote_ratio(100, 92, stated=0.95), remote_ratio(100, 0, stated=0.05)
    (0.95, 0.95, 0.0)
    """
    if not num_long:
        return None
    if num_remote in (0, num_long):
        return float(num_remote > 0)
    measured = num_remote / num_long
    if stated is not None and 0 < stated < 1 and abs(measured - stated) < _STEP:
        return stated
    steps = min(max(round(measured / _STEP), 1), round(1 / _STEP) - 1)
    return round(_STEP * steps, 2)


def steady(stated: int, measured: float) -> int:
    """A number in two digits: the one stated while what is measured is about the same, or nothing.

    >>> steady(0, 1234), steady(1200, 1400), steady(1200, 1600), steady(1200, 0)
    (1200, 1200, 1600, 1200)
    """
    if measured <= 0 or abs(measured - stated) <= _SAME * stated:
        return stated
    unit = 10 ** max(0, floor(log10(measured)) - 1)
    return int(round(measured / unit) * unit)
