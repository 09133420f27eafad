"""API keys, one per file of a mounted Secret, whose name is the tenant's; keys are never logged."""

import asyncio
import hmac
import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdcluster_worker.errors import ConfigError, RequestError
from pdcluster_worker.server.errors import reason, response_for
from pdcluster_worker.server.http.limits import TOO_MANY_CONNECTIONS
from pdcluster_worker.server.http.request_context import note_key

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
"""Period of looks at the folder; a kubelet takes a minute or two to change a mounted Secret."""

OVERVIEW = "/debug/cluster"
PAGE_FOLDER = "/page/"

_NO_KEY = (
    "you did not provide an API key: send the header Authorization: Bearer KEY, or x-api-key: KEY"
)
_WRONG_KEY = "incorrect API key provided: get one from the administrator of this service"

TenantOfKey = Callable[[str], str | None] | None
"""Tenant of a key now, None for one that is not valid; None = no key is required."""


class ApiKeys:
    """Without a folder every client is welcome.  Raises ConfigError if the first reading fails.

    A key that is gone is never accepted, with none left every request is refused, and only while
    the folder cannot be read do the last ones stay.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._read: dict[str, bytes] | None = None
        self._digests: dict[str, bytes] = {}  # by the file's name
        self._refused = ""
        if folder is not None:
            content = _content(folder)
            if bad := self._take(content) or ([] if content else [_no_key(folder)]):
                raise ConfigError(bad[0])

    @property
    def required(self) -> bool:
        return self._folder is not None

    def tenant_of(self, key: str) -> str | None:
        """None for no key.  Every key is compared, so a near miss takes as long as nonsense."""
        presented = sha256(key.encode(errors="surrogateescape")).digest()
        names = [
            name for name, known in self._digests.items() if hmac.compare_digest(presented, known)
        ]
        return names[0] if names else None

    async def watch(self) -> None:
        """Follow the folder until cancelled; returns at once when there is none."""
        while self.required:
            await asyncio.sleep(CHECK_SECONDS)
            self.reload()

    def reload(self) -> bool:
        """Look once; True if other keys are in force now."""
        if self._folder is None:
            return False
        try:
            content = _content(self._folder)
        except ConfigError as e:
            if str(e) != self._refused:
                logger.error("cannot read the API keys, keeping the last ones reason=%s", e)
            self._refused = str(e)
            return False
        if content == self._read:
            return False
        before = self._digests
        for bad in self._take(content):
            logger.error("ignored an unusable API key reason=%s", bad)
        if self._digests:
            logger.info("API keys reloaded folder=%s keys=%d", self._folder, len(self._digests))
        else:
            logger.error(
                "no API key is left, every request is refused with 401 reason=%s",
                _no_key(self._folder),
            )
        return self._digests != before

    def _take(self, content: dict[str, bytes]) -> list[str]:
        good: dict[str, bytes] = {}
        bad: list[str] = []
        for name, value in content.items():
            try:
                good[name] = sha256(_key(f"{self._folder}/{name}", value)).digest()
            except ConfigError as e:
                bad.append(str(e))
        self._digests, self._read, self._refused = good, content, ""
        return bad


def _content(folder: Path) -> dict[str, bytes]:
    """By name; what Kubernetes itself puts into a mounted Secret begins with a dot."""
    try:
        return {
            path.name: path.read_bytes()
            for path in sorted(folder.iterdir())
            if not path.name.startswith(".") and path.is_file()
        }
    except OSError as e:
        raise ConfigError(
            f"listen.apiKeys: {e.filename or folder} cannot be read: {e.strerror}"
        ) from e


def _no_key(folder: Path) -> str:
    return (
        f"listen.apiKeys: {folder} holds no key: put one file per key there, or leave apiKeys out"
    )


def _key(path: str, content: bytes) -> bytes:
    key = content.strip()
    if not key:
        raise ConfigError(f"listen.apiKeys: {path} is empty: write the key into it, or remove it")
    if not all(33 <= byte <= 126 for byte in key):
        raise ConfigError(
            f"listen.apiKeys: {path} holds more than one word of printable ASCII, which no client "
            "can send as a key"
        )
    return key


class Authorization:
    """Pure ASGI: refuses requests for the API before a byte of the body is read, where the
    connection limit is reached or a key is missing.  Probes and scrapers ask for neither.
    """

    def __init__(self, app: ASGIApp, tenant_of: TenantOfKey, rejected: Counter) -> None:
        self._app = app
        self._tenant_of = tenant_of
        self._rejected = rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and (_is_api(scope["path"]) or _is_page(scope["path"])):
            if TOO_MANY_CONNECTIONS in scope.get("state", ()):
                message = "this server has as many open requests as it takes: retry later"
                code = "connections_full"
                error = RequestError(message, status=503, code=code, retry_after_seconds=1)
                app = self._refusal(error, scope, {"connection": "close"})
            elif _is_api(scope["path"]) and (problem := self._key_problem(scope)) is not None:
                error = RequestError(problem, status=401, code="invalid_api_key")
                app = self._refusal(error, scope, {"www-authenticate": "Bearer"})
        await app(scope, receive, send)

    def _key_problem(self, scope: Scope) -> str | None:
        if self._tenant_of is None:
            return None
        key = presented_key(scope)
        if key is None:
            return _NO_KEY
        tenant = self._tenant_of(key)
        if tenant is None:
            return _WRONG_KEY
        note_key(scope, key, tenant)
        return None

    def _refusal(self, error: RequestError, scope: Scope, headers: dict[str, str]) -> ASGIApp:
        self._rejected.labels(reason(error)).inc()
        return response_for(error, scope, headers)


def presented_key(scope: Scope) -> str | None:
    """The key that the client sent; None = it sent none."""
    headers = Headers(scope=scope)
    return key_in(headers.get("authorization", ""), headers.get("x-api-key", ""))


def key_in(authorization: str, api_key: str) -> str | None:
    """The key in the values of these two headers, "" for one that did not come.

    >>> key_in("Bearer a", "b"), key_in("Basic a", "b"), key_in("", "")
    ('a', 'b', None)
    """
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return api_key.strip() or None


def _is_api(path: str) -> bool:
    return path.startswith("/v1/") or path in (
        *("/v1", "/tokenize", "/detokenize"),
        OVERVIEW,
    )


def _is_page(path: str) -> bool:
    """The page's own files: they need no key, as they ask for it."""
    return path == "/" or path.startswith(PAGE_FOLDER)
