"""Pairs of `status.transfers`: written whole, and read with care, since any writer may have changed
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pdcluster_api.plan.observed.state import PairVerification
from pdcluster_schema.text import shortened
from pdcluster_schema.workload import PoolPair

MAX_MESSAGE = 400
_TEXTS = {
    "at": "at",
    "request": "request",
    "fault": "fault",
    "message": "message",
    "decodeWorker": "decode_worker",
    "prefillWorker": "prefill_worker",
    "transport": "transport",
}
_NUMBERS = {
    "numTokens": "num_tokens",
    "numBytes": "num_bytes",
    "bytesPerSecond": "bytes_per_second",
}


@dataclass(frozen=True)
class VerifiedPair:
    """The last verification of a pair; num_failures: that did not pass, in a row."""

    verification: PairVerification
    num_failures: int = 0

    def as_status(self, pair: PoolPair) -> dict[str, Any]:
        """Its entry; what is empty or 0 is left out."""
        verified = self.verification
        fields = {
            **{name: getattr(verified, field) for name, field in _TEXTS.items()},
            **{name: getattr(verified, field) for name, field in _NUMBERS.items()},
            "message": shortened(verified.message, MAX_MESSAGE),
            "hasChecksum": verified.has_checksum,
            "numFailures": self.num_failures,
        }
        given = {name: value for name, value in fields.items() if value}
        return {"prefill": pair.prefill, "decode": pair.decode, **given}


def read_pairs(field: Mapping[str, Any], revision: str) -> dict[PoolPair, VerifiedPair]:
    """The pairs of a revision; entries that cannot be read are left out."""
    entries = field.get("pairs")
    if field.get("revision") != revision or not isinstance(entries, Sequence):
        return {}
    found = {}
    for entry in entries:
        if isinstance(entry, Mapping) and (read := _read(entry, revision)) is not None:
            found[PoolPair(str(entry.get("prefill")), str(entry.get("decode")))] = read
    return found


def _read(entry: Mapping[str, Any], revision: str) -> VerifiedPair | None:
    try:
        datetime.fromisoformat(entry["at"])
        known: dict[str, Any] = {
            **{field: str(entry.get(name, "")) for name, field in _TEXTS.items()},
            **{field: int(entry.get(name, 0)) for name, field in _NUMBERS.items()},
            "has_checksum": entry.get("hasChecksum") is True,
        }
        known["fault"] = known["fault"] or None
        verified = PairVerification(revision=revision, **known)
        return VerifiedPair(verified, max(0, int(entry.get("numFailures", 0))))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
