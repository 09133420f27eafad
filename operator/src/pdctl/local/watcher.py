"""Polls process and etcd record of every worker a few times a second.

Reads instead of an etcd watch: there are few keys, and a read needs no care after an outage, in
which the last records stay.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from pdcluster_api.discovery.etcd import RegisteredWorker, read_workers
from pdcluster_api.errors import EtcdUnreachableError
from pdctl.local.managed_process import ManagedProcess
from pdctl.local.rows import RestartLedger, Row, make_rows

_STARTING_SECONDS = 0.2
_STEADY_SECONDS = 1.0


class Watcher:
    """`changed` gets all rows when one differs; `all_ready` is set once all workers are ready."""

    def __init__(
        self, endpoints: Sequence[str], prefix: str, changed: Callable[[Sequence[Row]], None]
    ) -> None:
        self.all_ready = asyncio.Event()
        self._endpoints = endpoints
        self._prefix = prefix
        self._changed = changed
        self._records: Mapping[str, RegisteredWorker] = {}
        self._ledger = RestartLedger({})
        self._rows: tuple[Row, ...] = ()

    async def prime(self) -> None:
        """Read records of an earlier run, before any process starts.

        Raises EtcdUnreachableError.
        """
        self._ledger = RestartLedger(await read_workers(self._endpoints, self._prefix))

    async def run(self, workers: Sequence[tuple[str, str, ManagedProcess]]) -> None:
        """workers: (role, pool, process) of each."""
        while True:
            await self.refresh()
            self.poll(workers)
            await asyncio.sleep(_STEADY_SECONDS if self.all_ready.is_set() else _STARTING_SECONDS)

    def poll(self, workers: Sequence[tuple[str, str, ManagedProcess]]) -> None:
        rows = make_rows(workers, self._records, self._ledger)
        if rows != self._rows:
            self._rows = rows
            self._changed(rows)
        if all(row.is_ready for row in rows):
            self.all_ready.set()

    def report(self) -> None:
        self._changed(self._rows)

    def http_address(self, name: str) -> str:
        """As host:port, of a ready worker."""
        return next(row.addresses["http"] for row in self._rows if row.name == name)

    async def refresh(self) -> None:
        """Keeps the old records when etcd does not answer."""
        try:
            self._records = await read_workers(self._endpoints, self._prefix)
        except EtcdUnreachableError:
            return  # its own keeper says so when it is ours; workers that know each other go on
