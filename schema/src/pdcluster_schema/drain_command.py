"""Value of a drain command in etcd (docs/contracts.md): the key alone says that a worker drains."""

import json
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class DrainCommand:
    """since:         None = not known, as of a command that another writer made.
    grace_seconds: from SIGTERM to SIGKILL, where that is less than the pod's template says; None =
                   it is not.
    """

    since: datetime | None = None
    grace_seconds: int | None = None

    def encode(self) -> bytes:
        """
        >>> DrainCommand(datetime.fromisoformat("2026-01-01T00:00:00Z"), 5).encode()
        b'{"since": "2026-01-01T00:00:00+00:00", "graceSeconds": 5}'
        """
        since = {} if self.since is None else {"since": self.since.isoformat()}
        grace = {} if self.grace_seconds is None else {"graceSeconds": self.grace_seconds}
        return json.dumps({**since, **grace}).encode()

    @classmethod
    def decode(cls, value: bytes) -> "DrainCommand":
        """Leave out all that is not as expected.

        >>> DrainCommand.decode(b'{"since": 5, "graceSeconds": 5}')
        DrainCommand(since=None, grace_seconds=5)
        """
        try:
            given = json.loads(value)
        except ValueError:
            return cls()
        if not isinstance(given, dict):
            return cls()
        grace = given.get("graceSeconds")
        is_grace = isinstance(grace, int) and not isinstance(grace, bool) and grace >= 0
        return cls(_time_of(given.get("since")), grace if is_grace else None)


def _time_of(value: object) -> datetime | None:
    try:
        since = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return since if since is not None and since.tzinfo is not None else None
