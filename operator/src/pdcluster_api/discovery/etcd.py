"""Reading worker records from etcd. A read asks each endpoint in turn. Users write endpoints and
read the error: it names those that do not answer, and never how a port that is no etcd behaved;
only an etcd's own words are in it.
"""

import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from aetcd import rpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from pdcluster_api.discovery.addresses import ResolvedEndpoint
from pdcluster_api.errors import EtcdFullError, EtcdUnreachableError
from pdcluster_api.plan.observed.state import (
    StoppedTiers,
    WorkerDevice,
    WorkerDisaggregation,
)
from pdcluster_schema.text import one_line, shortened

_MAX_PEERS = 8
_MAX_TIERS = 3
_MAX_NAME = 63
_MAX_TEXT = 400
_MOST = 10**15
"""Largest count or rate: what is larger is no number that a worker means."""


def read_disaggregation(content: Mapping[str, Any]) -> WorkerDisaggregation | None:
    """Parts of the section; None where one cannot be read: the rest of the record counts."""
    found = content.get("disaggregation")
    if not isinstance(found, Mapping):
        return None
    try:
        ratio = found.get("remote_ratio")
        return WorkerDisaggregation(
            transport=str(found["transport"])[:_MAX_NAME],
            refused=tuple(
                (str(each["pod"])[:_MAX_NAME], shortened(str(each["reason"]), _MAX_TEXT))
                for each in list(found.get("refused", ()))[:_MAX_PEERS]
            ),
            num_refused=_count(found.get("num_refused", 0)),
            long_prompts=_count(found.get("long_prompts", 0)),
            remote_ratio=None if ratio is None else _ratio(ratio),
            bytes_per_second=_count(found.get("bytes_per_second", 0)),
            transport_note=shortened(str(found.get("transport_note", "")), _MAX_TEXT),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def read_stopped_tiers(content: Mapping[str, Any]) -> StoppedTiers:
    """An older worker says none; nothing where they cannot be read."""
    try:
        return tuple(
            (str(each["tier"])[:_MAX_NAME], shortened(str(each["reason"]), _MAX_TEXT))
            for each in list(content.get("stopped_tiers", ()))[:_MAX_TIERS]
        )
    except (KeyError, TypeError):
        return ()


def _count(value: Any) -> int:
    number = int(value)
    if not 0 <= number <= _MOST:
        raise ValueError(f"{number} is no count")
    return number


def _ratio(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or not 0 <= number <= 1:
        raise ValueError(f"{number} is no share")
    return number


logger = logging.getLogger(__name__)
TIMEOUT_SECONDS = 3
# A new connection must not inherit the back-off of one that failed.  All records of a cluster are
# one message: with 4096
# workers that each refuse peers they are more than the 4 MiB that gRPC takes by itself.
_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
)
_ETCD_PREFIX = "etcdserver: "
_NO_SPACE = "database space exceeded"
_MAX_REASON = 300  # characters: it goes into a condition


Endpoint = str | ResolvedEndpoint


@dataclass(frozen=True)
class RegisteredWorker:
    """The record of one worker. engine_id: of this life of its engine, empty until that has loaded;
    state: starting, ready, draining or drained; addresses: host:port by `http`, `grpc` and `kv`
    """

    pod: str
    role: str
    pool: str
    engine_id: str
    state: str
    addresses: dict[str, str]
    device: WorkerDevice | None = None
    disaggregation: WorkerDisaggregation | None = None
    stopped_tiers: StoppedTiers = ()
    is_changed: bool = False  # a command gave it another role than its pod's


@dataclass(frozen=True)
class EtcdTLS:
    """PEM contents; certificate and key only where etcd asks clients for them."""

    ca: bytes
    certificate: bytes | None = None
    key: bytes | None = None

    @classmethod
    def of_secret(cls, name: str, data: Mapping[str, bytes]) -> "EtcdTLS":
        """From the decoded data of a Secret. Raises EtcdUnreachableError that names the key and the
        fix.
        """
        ca, certificate, key = (data.get(file) or None for file in ("ca.crt", "tls.crt", "tls.key"))
        try:
            x509.load_pem_x509_certificates(ca or b"")
        except ValueError as e:
            raise EtcdUnreachableError(
                f"Secret {name}: ca.crt is not a PEM certificate: put etcd's certificate authority "
                "there"
            ) from e
        if certificate is None and key is None:
            return cls(ca or b"")
        try:
            public = x509.load_pem_x509_certificate(certificate or b"").public_key()
            is_pair = (
                serialization.load_pem_private_key(key or b"", password=None).public_key() == public
            )
        except (ValueError, TypeError) as e:
            fix = "put a PEM certificate and its unencrypted key there, or leave both out"
            raise EtcdUnreachableError(
                f"Secret {name}: tls.crt and tls.key cannot be read: {fix}"
            ) from e
        if not is_pair:
            raise EtcdUnreachableError(
                f"Secret {name}: tls.key does not belong to tls.crt: put the certificate's own key "
                "there"
            )
        return cls(ca or b"", certificate, key)


async def read_workers(
    endpoints: Sequence[str], prefix: str, tls: EtcdTLS | None = None
) -> dict[str, RegisteredWorker]:
    """Records below a prefix (`etcd_keys.workers_prefix`), by pod.  Raises EtcdUnreachableError."""
    found: dict[str, RegisteredWorker] = {}
    for key, value in await _read_prefix(endpoints, prefix, tls):
        record = parse_record(key.removeprefix(prefix), value)
        if record is not None:
            found[record.pod] = record
    return found


async def check_reachable(
    endpoints: Sequence[str], prefix: str, tls: EtcdTLS | None = None
) -> None:
    """Raise EtcdUnreachableError when no endpoint answers. Only the number of keys is read: the
    rights to the cluster's own keys suffice.
    """
    await call_each(
        endpoints,
        tls,
        lambda etcd: etcd.Range(below(prefix, limit=1, count_only=True), timeout=TIMEOUT_SECONDS),
    )


async def _read_prefix(
    endpoints: Sequence[str], prefix: str, tls: EtcdTLS | None
) -> list[tuple[str, bytes]]:
    response = await call_each(
        endpoints, tls, lambda etcd: etcd.Range(below(prefix), timeout=TIMEOUT_SECONDS)
    )
    return [(item.key.decode(errors="replace"), item.value) for item in response.kvs]


def below(prefix: str, **options: Any) -> Any:
    """Request for all keys below a prefix, which ends with a slash."""
    # "0" comes after "/"
    return rpc.RangeRequest(key=prefix.encode(), range_end=f"{prefix[:-1]}0".encode(), **options)


async def call_each(
    endpoints: Sequence[Endpoint],
    tls: EtcdTLS | None,
    ask: Callable[[Any], Awaitable[Any]],
    stub: Callable[[grpc.aio.Channel], Any] = rpc.KVStub,
) -> Any:
    """The first answer. ask: a call that may be repeated, on a stub of one of etcd's services.
    Raises EtcdFullError where one has no room for it, else EtcdUnreachableError.
    """
    failures, reasons = [], []
    for endpoint in endpoints:
        try:
            async with _channel(endpoint, tls) as channel:
                return await ask(stub(channel))
        except rpc.AioRpcError as e:
            reasons.append(_reason(e))
            if _NO_SPACE in (e.details() or ""):
                raise EtcdFullError(f"etcd at {endpoint} has no room (alarm NOSPACE)") from e
            reported = one_line(e.details() or "", _MAX_REASON)
            is_etcd = reported.startswith(_ETCD_PREFIX)
            failures.append(f"{endpoint} ({reported})" if is_etcd else str(endpoint))
    raise EtcdUnreachableError(f"etcd does not answer at {', '.join(failures)}", "; ".join(reasons))


def _channel(endpoint: Endpoint, tls: EtcdTLS | None) -> grpc.aio.Channel:
    target, options = str(endpoint), list(_OPTIONS)
    if isinstance(endpoint, ResolvedEndpoint):
        target = endpoint.target
        options.append(("grpc.default_authority", endpoint.text))
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    if isinstance(endpoint, ResolvedEndpoint):
        options.append(("grpc.ssl_target_name_override", endpoint.host))
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.aio.secure_channel(target, credentials, options=options)


def _reason(error: Any) -> str:
    """Error in one line: TLS reports many."""
    details = one_line(error.details() or "", _MAX_REASON)
    return f"{error.code().name}: {details}" if details else str(error.code().name)


def parse_record(relative_key: str, value: bytes) -> RegisteredWorker | None:
    """None (and a log line) for a value that is no record, so that it cannot hide the others."""
    try:
        role, pool, pod = relative_key.split("/")
        content: dict[str, Any] = json.loads(value)
        addresses = {kind: content[f"{kind}_address"] for kind in ("http", "grpc", "kv")}
        return RegisteredWorker(
            pod,
            role,
            pool,
            content["engine_id"],
            content["state"],
            addresses,
            device=_device(content),
            disaggregation=read_disaggregation(content),
            stopped_tiers=read_stopped_tiers(content),
            is_changed=content.get("pod_role") not in (None, role),
        )
    except (ValueError, KeyError, TypeError) as e:
        logger.warning("ignored worker record key=%s reason=%r", relative_key, e)
        return None


def _device(content: Mapping[str, Any]) -> WorkerDevice | None:
    """An older worker says none; what cannot be read hides nothing else of the record."""
    reported = content.get("device")
    if not isinstance(reported, Mapping) or not reported.get("kind"):
        return None
    texts = (str(reported.get(name) or "") for name in ("name", "note", "engine_note"))
    return WorkerDevice(str(reported["kind"]), *texts)
