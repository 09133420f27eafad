"""The channel to one worker, with all requests that are under way on it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from pdcluster_worker.peers.calls import open_channel, open_stub
from pdcluster_worker.peers.generate_client import GenerateClient

if TYPE_CHECKING:
    from pdcluster_worker.proto.worker_pb2_grpc import WorkerAsyncStub


class PeerChannel:
    """A channel to one worker, and how many requests are under way on it.  credentials: what it
    shows, for as long as it lives.
    """

    def __init__(self, address: str, credentials: grpc.ChannelCredentials) -> None:
        self.credentials = credentials
        self._channel = open_channel(address, credentials)
        self.stub = open_stub(self._channel)
        start: Any = self.stub.Generate  # frames are written to it: its types know iterators alone
        self.generating = GenerateClient(start, self._count)
        self._num_requests = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def request(self) -> "Iterator[WorkerAsyncStub]":
        """The stub for a request, which `idle` waits for."""
        self._count(1)
        try:
            yield self.stub
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._num_requests += change
        if self._num_requests:
            self._is_idle.clear()
        else:
            self._is_idle.set()

    async def idle(self) -> None:
        """Wait until the last request has ended: by itself, with the worker, or with the
        connection, which the pings of `options` watch.
        """
        while self._num_requests:
            await self._is_idle.wait()

    async def close(self) -> None:
        """End every call on it."""
        await self.generating.close()
        await self._channel.close(None)
