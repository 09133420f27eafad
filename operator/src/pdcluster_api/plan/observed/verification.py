"""Verifications of KV transfers between two pools, as an operator or `pdctl` has them from a decode
worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdcluster_schema.workload import PoolPair


@dataclass(frozen=True)
class PairVerification:
    """One that has ended, with KV that moved or a fault.

    revision: of its workers
    at:       RFC 3339, when it ended
    request:  value of the annotation that asked for it; empty = none did
    fault:    as the worker calls it (docs/contracts.md); None = it passed; message: why, in words
    decode_worker, prefill_worker: pods; the second is empty where none was reached
    """

    revision: str
    at: str
    request: str = ""
    fault: str | None = None
    message: str = ""
    decode_worker: str = ""
    prefill_worker: str = ""
    transport: str = ""
    num_tokens: int = 0
    num_bytes: int = 0
    bytes_per_second: int = 0
    has_checksum: bool = False


@dataclass(frozen=True)
class PairVerifications:
    """Newest outcomes since the operator began.

    ended: the last verification of a pair
    waits: why nothing is known of a pair that was asked for since: it is busy, or does not answer
    """

    ended: Mapping[PoolPair, PairVerification] = field(default_factory=dict)
    waits: Mapping[PoolPair, str] = field(default_factory=dict)
