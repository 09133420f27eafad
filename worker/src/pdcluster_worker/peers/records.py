"""Records of workers in etcd (docs/contracts.md).

A value that is not a record of our schema is ignored with one log line, so a newer or broken writer
never takes a worker down.
"""

import logging
from typing import Annotated, Literal

import msgspec

from pdcluster_schema.etcd_keys import pod_of
from pdcluster_worker.config.worker import Role
from pdcluster_worker.messages.facts import DeviceFacts

logger = logging.getLogger(__name__)

SCHEMA: Literal[1] = 1

WorkerState = Literal["starting", "ready", "draining", "drained"]


EngineState = Literal["ready", "stalled", "lost"]


class RefusedPeer(msgspec.Struct, frozen=True):
    """A peer that moves no KV to or from this worker."""

    pod: str
    reason: str


class DisaggregationRecord(msgspec.Struct, frozen=True):
    """State of prefill and decode together, as one worker sees it.

    transport:        that moved the last KV; before any, the one that it has.
    refused:          prefill workers that this decode worker may not use, the first few.
    long_prompts:     about how many prompts lately were worth a remote prefill.
    remote_ratio:     the share of them that a prefill worker computed; None = there was none.
    bytes_per_second: about what the last KV transfer from here reached; 0 = there was none.
    transport_note:   why not the transport that engine.transport asks for; "" = it did.
    """

    transport: str
    refused: list[RefusedPeer] = []
    num_refused: int = 0
    long_prompts: int = 0
    remote_ratio: float | None = None
    bytes_per_second: int = 0
    transport_note: str = ""


class StoppedTier(msgspec.Struct, frozen=True):
    """A tier of KV that takes no blocks, or is not read, and why."""

    tier: str
    reason: str


class EngineRecord(msgspec.Struct, frozen=True):
    """One of several engines of a worker."""

    rank: int
    engine_id: str
    kv_address: str
    state: EngineState


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker.  Addresses are host:port; `engine_id` is empty until its engine has loaded.

    device: None = the writer of the record does not say.
    engines: of a worker with several; `engine_id` and `kv_address` are those of the first.
    pod_role: of its pod, where a command gave it another role; the Service goes by it.
    """

    engine_id: str
    pod: Annotated[str, msgspec.Meta(min_length=1)]
    grpc_address: str
    kv_address: str
    http_address: str
    role: Role
    pool: str
    state: WorkerState
    device: DeviceFacts | None = None
    disaggregation: DisaggregationRecord | None = None
    engines: list[EngineRecord] = []
    pod_role: Role | None = None
    stopped_tiers: list[StoppedTier] = []
    schema: Literal[1] = SCHEMA


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(WorkerRecord).decode


def encode_record(record: WorkerRecord) -> bytes:
    return _encode(record)


def decode_record(key: str, value: bytes) -> WorkerRecord | None:
    """None, with a log line, when it is not JSON, not of our schema or not of that key's pod."""
    try:
        record = _decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        logger.warning("ignored worker record key=%s reason=%s", key, e)
        return None
    if record.pod != pod_of(key):
        logger.warning("ignored worker record key=%s reason=it is of pod %s", key, record.pod)
        return None
    return record
