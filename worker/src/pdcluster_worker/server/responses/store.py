"""Responses that are kept in this worker's memory, bounded in number, bytes and time.  Of the key
that has the most the oldest go first, so no key's responses push out another's.  An id names its
worker, so another one can say so.
"""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdcluster_schema.text import quoted
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.generation.formatter import to_json
from pdcluster_worker.server.responses.schemas import Item

MAX_RESPONSES = 4096
MAX_BYTES = 128 << 20
MAX_SECONDS = 24 * 3600.0

_WORKER_DIGITS = 8
_OBJECT_BYTES = 512
"""Bytes of memory that each object of a response or an item takes beside its JSON; measured."""


@dataclass(frozen=True, slots=True)
class Kept:
    """body: as answered.  input: the request's items, as listed.  num_bytes: in memory, earlier
    turns included.
    """

    body: dict[str, Any]
    input: list[dict[str, Any]]
    conversation: tuple[Item, ...]
    num_bytes: int


def bytes_of(value: dict[str, Any] | list[dict[str, Any]]) -> int:
    """Memory taken, about: small items weigh more than their JSON."""
    text = to_json(value)
    return len(text) + _OBJECT_BYTES * text.count(b'{"')


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    kept: Kept
    owner: bytes
    at: float


@dataclass(slots=True)
class _Owned:
    ids: OrderedDict[str, None] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """owner: the digest of an API key, b"" where none is asked for.  clock: monotonic seconds."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self._clock = clock
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._worker = uuid.uuid4().hex[:_WORKER_DIGITS]
        self._entries: OrderedDict[str, _StoredResponse] = OrderedDict()
        self._owners: dict[bytes, _Owned] = {}
        self._num_bytes = 0

    def new_id(self, request_id: str) -> str:
        return f"resp_{self._worker}{request_id}"

    def put(self, response_id: str, owner: bytes, kept: Kept) -> None:
        """Keep a response; one that is larger than all that may be kept is not."""
        if kept.num_bytes > self._max_bytes:
            return
        self._entries[response_id] = _StoredResponse(kept, owner, self._clock())
        owned = self._owners.setdefault(owner, _Owned())
        owned.ids[response_id] = None
        owned.num_bytes += kept.num_bytes
        self._num_bytes += kept.num_bytes
        self._expire()

    def get(self, response_id: str, owner: bytes, param: str | None = None) -> Kept:
        """Raises RequestError naming where it may be: 404, or 400 with the field `param`."""
        self._expire()
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            raise self._missing(response_id, param)
        return entry.kept

    def delete(self, response_id: str, owner: bytes) -> None:
        """Those that went on from it stay.  Raises RequestError 404."""
        self.get(response_id, owner)
        self._drop(response_id)

    def _expire(self) -> None:
        oldest = self._clock() - self._max_seconds
        while self._entries and (first := next(iter(self._entries.items())))[1].at < oldest:
            self._drop(first[0])
        while len(self._entries) > self._max_responses:
            self._drop_of(max(self._owners.values(), key=lambda owned: len(owned.ids)))
        while self._num_bytes > self._max_bytes:
            self._drop_of(max(self._owners.values(), key=lambda owned: owned.num_bytes))

    def _drop_of(self, owned: _Owned) -> None:
        self._drop(next(iter(owned.ids)))

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id)
        owned = self._owners[entry.owner]
        del owned.ids[response_id]
        owned.num_bytes -= entry.kept.num_bytes
        self._num_bytes -= entry.kept.num_bytes
        if not owned.ids:
            del self._owners[entry.owner]

    def _missing(self, response_id: str, param: str | None) -> RequestError:
        name = f"response {quoted(response_id)}"
        prefix = "resp_"
        worker = response_id.removeprefix(prefix)[:_WORKER_DIGITS]
        is_elsewhere = response_id.startswith(prefix) and worker != self._worker
        if is_elsewhere:
            why = (
                "was made by another worker, or before a restart: responses are kept in the memory "
                "of the worker that made them; "
                "send the whole conversation as input, or let one worker take all requests of a "
                "conversation (session affinity)"
            )
        else:
            why = (
                "is not kept here (any more): it was not stored, has expired or was deleted; send "
                "the whole conversation as input"
            )
        if param is None:
            return RequestError(f"{name} {why}", status=404, code="response_not_found")
        return RequestError(
            f"{param}: {name} {why}", param=param, code="previous_response_not_found"
        )
