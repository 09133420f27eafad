"""One connection to one etcd endpoint.  Every end of a call or a watch is an EtcdError.

aetcd brings messages and stubs.  Its client speaks no TLS, and is silent when a watch ends.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from itertools import cycle
from types import TracebackType
from typing import Any, TypeVar, cast, get_args

import grpc
from aetcd import rpc

from pdcluster_schema.text import quoted
from pdcluster_worker.backoff import Reconnect
from pdcluster_worker.config.worker import DiscoveryConfig
from pdcluster_worker.errors import ConfigError, PeerError
from pdcluster_worker.peers.calls import cancelled_locally
from pdcluster_worker.peers.tls import EtcdCredentials
from pdcluster_worker.system.native_dtype import DType

logger = logging.getLogger(__name__)

ResponseT = TypeVar("ResponseT")

# A new connection is made after every failure, so it must not inherit another one's back-off from
# gRPC's shared pool.  All records of a cluster are one message, which may be more than the 4 MiB
# that gRPC takes by itself: thousands of workers that each name the peers that they refuse.
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 64 << 20),
)

# What `read` returns at the end of a stream; the type stubs lack it.
_EOF: Any = vars(grpc.aio)["EOF"]

CALL_SECONDS = 5.0
"""Bound of one call to etcd; never longer than the lease."""

# Ends the watch of a member that has lost its quorum: it would be silent for as long as that lasts.
_HAS_LEADER = (("hasleader", "true"),)


class EtcdError(PeerError):
    """etcd did not answer, or ended a call."""


@dataclass(frozen=True, slots=True)
class EtcdListing:
    """The values under a key or prefix, at one revision of one etcd cluster."""

    cluster_id: int
    revision: int
    values: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """value: None = deleted."""

    key: str
    value: bytes | None


class Etcd:
    """endpoint: host:port.  timeout_seconds: of each call.

    A `key` that ends in "/" means everything under it.
    """

    def __init__(
        self,
        endpoint: str,
        timeout_seconds: float,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._credentials = credentials
        self._timeout_seconds = timeout_seconds

    async def __aenter__(self) -> "Etcd":
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self._endpoint, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(
                self._endpoint, self._credentials, options=_OPTIONS
            )
        self._kv, self._lease = rpc.KVStub(self._channel), rpc.LeaseStub(self._channel)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close(None)

    async def read(self, key: str) -> EtcdListing:
        request = rpc.RangeRequest(key=key.encode(), range_end=_range_end(key))
        response = await self._call(self._kv.Range, request)
        values = {kv.key.decode(errors="replace"): kv.value for kv in response.kvs}
        return EtcdListing(response.header.cluster_id, response.header.revision, values)

    async def put(self, key: str, value: bytes, lease_id: int) -> None:
        await self._call(
            self._kv.Put, rpc.PutRequest(key=key.encode(), value=value, lease=lease_id)
        )

    async def create(self, key: str, value: bytes) -> bytes:
        """Write a key without a lease unless it is there; returns its value."""
        raw = key.encode()
        absent = rpc.Compare(
            result=rpc.Compare.EQUAL, target=rpc.Compare.CREATE, key=raw, create_revision=0
        )
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=raw, value=value))
        get = rpc.RequestOp(request_range=rpc.RangeRequest(key=raw))
        request = rpc.TxnRequest(compare=[absent], success=[put], failure=[get])
        answer = await self._call(self._kv.Txn, request)
        found: bytes = (
            value if answer.succeeded else answer.responses[0].response_range.kvs[0].value
        )
        return found

    async def grant(self, seconds: int) -> int:
        """Returns the id of a new lease."""
        response = await self._call(self._lease.LeaseGrant, rpc.LeaseGrantRequest(TTL=seconds))
        return int(response.ID)

    async def revoke(self, lease_id: int) -> None:
        await self._call(self._lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease_id))

    async def keep_alive(self, lease_id: int) -> None:
        """Raises EtcdError when the lease has expired, or this etcd never knew it."""
        call = self._lease.LeaseKeepAlive(timeout=self._timeout_seconds)
        try:
            await _checked(call.write(rpc.LeaseKeepAliveRequest(ID=lease_id)))
            response = await _checked(call.read())
        finally:
            call.cancel()
        if response is _EOF or response.TTL <= 0:
            raise EtcdError("the lease of this worker has expired")

    async def watch(self, key: str, from_revision: int) -> AsyncGenerator[list[KeyEvent], None]:
        """Every change from that revision on, until EtcdError."""
        call = rpc.WatchStub(self._channel).Watch(metadata=_HAS_LEADER)
        create = rpc.WatchCreateRequest(
            key=key.encode(), range_end=_range_end(key), start_revision=from_revision
        )
        try:
            await _checked(call.write(rpc.WatchRequest(create_request=create)))
            while (response := await _checked(call.read())) is not _EOF:
                if response.canceled:
                    raise EtcdError(
                        "etcd cancelled the watch: "
                        f"{response.cancel_reason or 'its start revision was compacted'}"
                    )
                yield [_event(event) for event in response.events]
        finally:
            call.cancel()
        raise EtcdError("etcd ended the watch")

    async def _call(self, method: Any, request: Any) -> Any:
        return await _checked(method(request, timeout=self._timeout_seconds))


async def _checked(call: Awaitable[ResponseT]) -> ResponseT:
    try:
        return await call
    except grpc.RpcError as e:
        detail = e.details() if isinstance(e, grpc.aio.AioRpcError) else str(e)
        raise EtcdError(detail or type(e).__name__) from e
    except asyncio.InvalidStateError as e:  # a write on a call that has just ended
        raise EtcdError(str(e)) from e
    except asyncio.CancelledError as e:
        if cancelled_locally():
            raise
        raise EtcdError("etcd cancelled the call") from e


def _event(event: Any) -> KeyEvent:
    return KeyEvent(
        event.kv.key.decode(errors="replace"),
        None if event.type == rpc.Event.DELETE else event.kv.value,
    )


def _range_end(key: str) -> bytes:
    # The first key after all that start with "...{x}/" is "...{x}0"; an empty end means the key
    # alone.
    return f"{key[:-1]}0".encode() if key.endswith("/") else b""


async def agreed_dtype(
    config: DiscoveryConfig, key: str, proposal: DType, report: Callable[[str], None]
) -> DType:
    """The dtype of a revision, since KV moves only between workers of one: the
    value of `key` in etcd, or the proposal, which is then stored there.

    Retries until etcd answers; `report` gets the reason of a failure, each time that it changes.
    Raises ConfigError when the key holds no dtype.
    """
    tls = None if config.tls is None else EtcdCredentials(config.tls)
    retry, reported = Reconnect(), ""
    for endpoint in cycle(config.endpoints):
        credentials = None if tls is None else tls.channel()
        try:
            async with Etcd(endpoint, CALL_SECONDS, credentials) as etcd:
                found = await etcd.create(key, proposal.encode())
        except EtcdError as e:
            if str(e) != reported:
                reported = str(e)
                logger.warning("dtype not agreed etcd=%s reason=%s", endpoint, e)
                report(f"etcd {endpoint}, which keeps the dtype of this revision: {e}")
            await retry.pause()
            continue
        for dtype in get_args(DType):
            if found == dtype.encode():
                return cast(DType, dtype)
        raise ConfigError(
            f"etcd has {quoted(found)} under {key}: must be one of {', '.join(get_args(DType))}; "
            "delete that key"
        )
    raise AssertionError("unreachable: cycle never ends")
