"""Order in which constraints are compiled: each API key has its turn, whatever the others send.

The next is the first constraint of the key whose compiles have taken the fewest
seconds since the line was last empty; equals by arrival.  One key never has the last
slot, so that another one's constraint is begun at once while the first one's take
their time.  A key that joins late starts where the line is.  With one key it is first
come, first served.  Pure.
"""

from dataclasses import dataclass, field

from pdcluster_worker.messages.constraint import ConstraintKind

Key = tuple[ConstraintKind, str, bool]
"""Kind, text and strictness of a constraint."""


@dataclass(slots=True)
class _TenantShare:
    """Part of one API key.  seconds: that its compiles took."""

    seconds: float
    num_running: int = 0
    waiting: dict[Key, int] = field(default_factory=dict)  # to the number of its arrival


class CompileQueue:
    """Constraints that wait, for some slots.  Tenants are API keys by name."""

    def __init__(self, num_slots: int) -> None:
        self._most_running = max(1, num_slots - 1)
        self._shares: dict[str, _TenantShare] = {}
        self._level = 0.0  # seconds of the one that was served last
        self._num_arrived = 0

    def add(self, tenant: str, key: Key) -> bool:
        """Put a constraint at the end of the tenant's; False where it stands there already."""
        if not any(share.waiting or share.num_running for share in self._shares.values()):
            self._shares, self._level = {}, 0.0
        share = self._shares.setdefault(tenant, _TenantShare(self._level))
        if not share.waiting and not share.num_running:
            share.seconds = max(share.seconds, self._level)
        if key in share.waiting:
            return False
        self._num_arrived += 1
        share.waiting[key] = self._num_arrived
        return True

    def discard(self, key: Key) -> None:
        """Take a constraint out for all that wait for it; an unknown one is a no-op."""
        for share in self._shares.values():
            share.waiting.pop(key, None)

    def take(self) -> tuple[str, Key] | None:
        """The constraint whose turn it is, and its tenant, which has a slot until `done`; None =
        there is none.
        """
        able = [
            (share.num_running, share.seconds, next(iter(share.waiting.values())), tenant)
            for tenant, share in self._shares.items()
            if share.waiting and share.num_running < self._most_running
        ]
        if not able:
            return None
        tenant = min(able)[-1]
        share = self._shares[tenant]
        key = next(iter(share.waiting))
        self._level = share.seconds
        share.num_running += 1
        self.discard(key)
        return tenant, key

    def done(self, tenant: str, seconds: float) -> None:
        """A compile of the tenant has ended after so long."""
        share = self._shares[tenant]
        share.num_running -= 1
        share.seconds += seconds
