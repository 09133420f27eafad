"""Watch the objects of a kind: the API server's lines as events. It sends a bookmark a minute, so a
watch without any line for longer is dead.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import UnavailableError, error_of
from pdcluster_api.apiserver.kinds import Body, Kind
from pdcluster_schema.quick_json import decoded, encoded

SILENCE_SECONDS = 70.0  # Silence of a watch that is taken for dead

# Time after which the API server ends a watch: another one may go to another API server
SERVER_SECONDS = 240

_TYPES = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK")


@dataclass(frozen=True)
class WatchEvent:
    """One event.  version: from which a watch goes on after it."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    body: Body

    @property
    def version(self) -> str:
        return str(self.body["metadata"]["resourceVersion"])


@dataclass(frozen=True)
class Selection:
    """Objects of a kind, in a namespace or (None) in all, with some labels."""

    kind: Kind
    namespace: str | None = None
    labels: str = ""


async def watch(
    client: ApiClient, what: Selection, since: str, silence_seconds: float = SILENCE_SECONDS
) -> AsyncIterator[WatchEvent]:
    """Events after a version, until the API server ends the watch.  Raises GoneError when that
    version is too old, UnavailableError when the watch breaks or is silent.
    """
    query = {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": since,
        "timeoutSeconds": str(SERVER_SECONDS),
        **({"labelSelector": what.labels} if what.labels else {}),
    }
    async for line in client.lines(what.kind, what.namespace, query, silence_seconds):
        yield _event(line)


def _event(line: bytes) -> WatchEvent:
    """One line.  Raises the error that it says, and UnavailableError for what is no event."""
    try:
        found = decoded(line)
        kind, body = found["type"], found["object"]
    except (ValueError, KeyError, TypeError) as e:
        raise UnavailableError("a line of a watch is no event; is there a proxy between?") from e
    if kind not in _TYPES:
        raise error_of(int(body.get("code") or 500), encoded(body), {})
    return WatchEvent(kind, body)
