"""Reading worker records from etcd.

A read asks each endpoint in turn, so one that is down costs its time limit and
no more.  Records are leased: one that is gone belongs to a worker that is gone.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import aetcd

from pdcluster_operator.api.errors import EtcdUnreachableError

logger = logging.getLogger(__name__)
_TIMEOUT_SECONDS = 3
_OPTIONS = {"grpc.use_local_subchannel_pool": 1}  # a new connection must not inherit the back-off of one that failed


@dataclass(frozen=True)
class WorkerRecord:
    """What one worker announces.

    engine_id: of this life of its engine, a restart has another; empty until the engine has loaded
    state:     starting, ready, draining or drained
    addresses: host:port by `http`, `grpc` and `kv`
    """

    pod: str
    role: str
    pool: str
    engine_id: str
    state: str
    addresses: dict[str, str]


async def read_workers(endpoints: Sequence[str], prefix: str) -> dict[str, WorkerRecord]:
    """Records below a prefix (`keys.workers_prefix`), by pod.  Raises EtcdUnreachableError."""
    found: dict[str, WorkerRecord] = {}
    for key, value in await _read_prefix(endpoints, prefix):
        record = parse_record(key.removeprefix(prefix), value)
        if record is not None:
            found[record.pod] = record
    return found


async def check_reachable(endpoints: Sequence[str]) -> None:
    """Raises EtcdUnreachableError when no endpoint answers a read."""
    await _read_prefix(endpoints, "/pdcluster/")


async def _read_prefix(endpoints: Sequence[str], prefix: str) -> list[tuple[str, bytes]]:
    failures = []
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        try:
            async with aetcd.Client(host=host, port=int(port), timeout=_TIMEOUT_SECONDS, options=_OPTIONS) as client:
                return [(item.key.decode(), item.value) for item in await client.get_prefix(prefix.encode())]
        except (aetcd.ClientError, OSError, TimeoutError) as e:
            failures.append(f"{endpoint} ({type(e).__name__})")
    raise EtcdUnreachableError(f"etcd does not answer at {', '.join(failures)}")


def parse_record(relative_key: str, value: bytes) -> WorkerRecord | None:
    """One record; None (and a log line) for a value that is not one, so that it cannot hide the others."""
    try:
        role, pool, pod = relative_key.split("/")
        content: dict[str, str] = json.loads(value)
        addresses = {kind: content[f"{kind}_address"] for kind in ("http", "grpc", "kv")}
        return WorkerRecord(pod, role, pool, content["engine_id"], content["state"], addresses)
    except (ValueError, KeyError, TypeError) as e:
        logger.warning("ignored worker record key=%s reason=%r", relative_key, e)
        return None
