"""The role that a worker is to have: that of its pod, or of a command in etcd."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pdcluster_worker.config.worker import Role

logger = logging.getLogger(__name__)

PAIRED: tuple[Role, ...] = ("prefill", "decode")
"""A worker with one of these roles takes the other by a command."""


class RoleCommand:
    """role: the worker has it until `changed` returns.  on_change: called with whether it is to
    have another.
    """

    def __init__(self, pod_role: Role, role: Role, on_change: Callable[[bool], None]) -> None:
        self._pod_role, self._role = pod_role, role
        self._next = role
        self._on_change = on_change
        self._is_leaving = asyncio.Event()

    def take(self, commanded: str | None) -> None:
        """commanded: None = no command."""
        found = [role for role in PAIRED if role == commanded and self._pod_role in PAIRED]
        if commanded is not None and not found:
            logger.warning("ignored role command role=%s pod_role=%s", commanded, self._pod_role)
        self._next = found[0] if found else self._pod_role
        if self._next == self._role:
            self._is_leaving.clear()
        else:
            self._is_leaving.set()
        self._on_change(self._is_leaving.is_set())

    async def changed(self, drained: Callable[[], Awaitable[None]]) -> Role:
        """The next role, once nothing of the present one is left.  drained: waits for that."""
        while True:
            await self._is_leaving.wait()
            await drained()
            if self._is_leaving.is_set():
                return self._next
