"""Requests to the API server, as raw JSON: no model classes, which would take most of the memory.
No connection, 429 and 5xx are tried again a bounded number of times; the rest is raised as one of
`errors`.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdcluster_api.apiserver.connection import (
    ApiConnection,
    ApiMetrics,
    ApiRequest,
    LongResponseError,
    lines_of,
    read,
)
from pdcluster_api.apiserver.errors import (
    ClusterError,
    ConflictError,
    GoneError,
    NotFoundError,
    UnavailableError,
    error_of,
)
from pdcluster_api.apiserver.kinds import POD, Body, Kind
from pdcluster_api.errors import no_answer
from pdcluster_schema.backoff import Backoff
from pdcluster_schema.labels import FIELD_MANAGER
from pdcluster_schema.quick_json import decoded, encoded, encoded_as_stored, encoded_as_yaml

logger = logging.getLogger(__name__)

APPLY = "application/apply-patch+yaml"  # JSON is YAML

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
CONNECT_SECONDS = 5.0  # Until the connection of a watch stands; it has no time limit as a whole

FIRST_PAGE = 10  # Objects of the first page of a list; the later ones follow from its bytes

# Bytes of a page of a list, about: parsed it takes some times as much memory, and an object may
# have 1.5 MiB
PAGE_BYTES = 4 * 2**20

# Bytes at which a page is asked for again with fewer objects: large ones may follow small ones
MOST_PAGE_BYTES = 4 * PAGE_BYTES

OK = 200

# Query of every write. By default the API server parses a body twice, to warn of unknown fields: no
# one reads a warning of ours, and an apply with one is refused all the same.
_WRITE = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Ignore"}


@dataclass(frozen=True)
class ClientLimits:
    timeout_seconds: float = 15.0  # of one try
    tries: int = 4  # in all
    first_delay_seconds: float = 0.2  # before the second try, doubled before each further one
    max_delay_seconds: float = 10.0  # the longest wait, the server's Retry-After included
    page: int = 500  # objects per answer of a list, at most; fewer of large ones

    def delay(self, num_tries: int, retry_after: float | None) -> float:
        """Seconds to wait after so many tries; with jitter, so that waiting callers spread out."""
        backoff = Backoff(self.first_delay_seconds, self.max_delay_seconds)
        requested = backoff.after(num_tries) if retry_after is None else retry_after
        seconds = min(self.max_delay_seconds, requested)
        return seconds * random.uniform(1.0, 1.25)


@dataclass(frozen=True)
class ListPage:
    """version: of the whole list, from which a watch goes on."""

    items: Sequence[Body]
    version: str


class ApiClient:
    """The API server.  Use it as a context manager, or `close` it."""

    def __init__(
        self,
        connection: ApiConnection,
        metrics: ApiMetrics,
        limits: ClientLimits | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._connection, self._metrics, self._sleep = connection, metrics, sleep
        self._limits = limits or ClientLimits()
        self._timeout = aiohttp.ClientTimeout(total=self._limits.timeout_seconds)

    async def __aenter__(self) -> "ApiClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Body:
        return await self._send(ApiRequest("get", kind.name, kind.path(namespace, name)))

    async def find(self, kind: Kind, namespace: str, name: str) -> Body | None:
        try:
            return await self.get(kind, namespace, name)
        except NotFoundError:
            return None

    async def proxied(self, namespace: str, pod: str, port: int, path: str) -> Body:
        """Answer of a pod to a GET; NotFoundError is the pod's own 404 too."""
        proxy = f"{POD.path(namespace, f'{pod}:{port}')}/proxy{path}"
        return await self._send(ApiRequest("get", "pods/proxy", proxy))

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Body]:
        async for page in self.pages(kind, namespace, labels=labels, fields=fields):
            for item in page.items:
                yield item

    async def pages(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[ListPage]:
        """Every object of a kind (in a namespace, or in all), with apiVersion and kind.  A list
        that lasted so long that its version is no longer kept starts again, and may repeat objects.
        """
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        query = {key: value for key, value in selectors.items() if value}
        named = {"apiVersion": kind.api_version, "kind": kind.kind}  # which items of a list lack
        limit = min(FIRST_PAGE, self._limits.page)
        position: dict[str, str] = {}
        restarts = 0
        while True:
            params = {"limit": str(limit), **query, **position}
            most = MOST_PAGE_BYTES if limit > 1 else None
            request = ApiRequest("list", kind.name, kind.path(namespace), params, most_bytes=most)
            try:
                page, num_bytes = await self._send_sized(request)
            except LongResponseError:
                limit = max(1, limit // 4)
                continue
            except GoneError:
                restarts += 1
                if not position or restarts >= self._limits.tries:
                    raise
                position = {}
                continue
            metadata = page.get("metadata", {})
            items = [{**named, **item} for item in page.get("items") or ()]
            yield ListPage(items, metadata.get("resourceVersion", ""))
            following = metadata.get("continue")
            if not following:
                return
            position = {"continue": following}
            limit = max(1, min(self._limits.page, max(1, len(items)) * PAGE_BYTES // num_bytes))

    async def lines(
        self, kind: Kind, namespace: str | None, query: Mapping[str, str], silence_seconds: float
    ) -> AsyncIterator[bytes]:
        """Lines of a watch, until the API server ends it; `informer.watches` makes events of them.

        silence_seconds: without a line it is taken for dead after that time.
        Raises GoneError when its start is too old, UnavailableError when it breaks or is silent.
        """
        request = ApiRequest("watch", kind.name, kind.path(namespace), query)
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds
        )
        code = 0
        try:
            response = await self._connection.send(request, None, timeout)
            async with response:
                code = response.status
                if code != OK:
                    raise error_of(code, await response.read(), response.headers)
                async for line in lines_of(response.content):
                    yield line
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise _no_response(e) from e
        finally:
            self._metrics.calls.labels(request.verb, request.kind, str(code)).inc()

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Body:
        """Raises ConflictError when one of that name exists, also by a lost answer."""
        path = kind.path(body["metadata"]["namespace"])
        return await self._send(ApiRequest("create", kind.name, path, _WRITE, body))

    async def apply(self, kind: Kind, body: Mapping[str, Any], *, force: bool = True) -> Body:
        """Server-side apply; with metadata.uid only to that very object.  force: take over fields
        that others have set otherwise; without it they are a ConflictError
        """
        path = kind.path(body["metadata"]["namespace"], body["metadata"]["name"])
        query = {**_WRITE, "force": str(force).lower()}
        return await self._send(ApiRequest("apply", kind.name, path, query, body, APPLY))

    async def merge_patch(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]
    ) -> Body:
        """Conditional if the patch has metadata.resourceVersion."""
        path = kind.path(namespace, name)
        return await self._send(ApiRequest("patch", kind.name, path, _WRITE, patch, MERGE_PATCH))

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> Body:
        """JSON patch of the status.  Raises ConflictError when a `test` operation fails."""
        path = f"{kind.path(namespace, name)}/status"
        request = ApiRequest("patch", kind.name, path, _WRITE, operations, JSON_PATCH)
        return await self._send(request)

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> Body:
        path = kind.path(body["metadata"]["namespace"], body["metadata"]["name"])
        return await self._send(ApiRequest("update", kind.name, path, _WRITE, body))

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str,
        foreground: bool = False,
        grace_seconds: int | None = None,
    ) -> Body | None:
        """Delete that very object (not another one of the name); one that is gone is no error.
        What it owns goes after it, or with foreground before it: then it is being deleted for as
        long as the garbage collector knows of anything of that, and is returned so. Without, one
        that is being deleted in the foreground goes at once.
        grace_seconds: 0 = the object of a pod goes without word of its kubelet; None = its own
        """
        policy = "Foreground" if foreground else "Background"
        options: Body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": policy,
            "preconditions": {"uid": uid},
        }
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            response = await self._send(
                ApiRequest("delete", kind.name, kind.path(namespace, name), body=options)
            )
        except NotFoundError:
            logger.debug("already gone kind=%s namespace=%s name=%s", kind, namespace, name)
            return None
        # else it is gone, or a Status says so
        return response if foreground and "deletionTimestamp" in response["metadata"] else None

    async def _send(self, request: ApiRequest) -> Body:
        body, _ = await self._send_sized(request)
        return body

    async def _send_sized(self, request: ApiRequest) -> tuple[Body, int]:
        num_tries, sent, errors = 0, _encoded(request), self._metrics.errors
        while True:
            num_tries += 1
            code, started = 0, time.monotonic()
            try:
                try:
                    response = await self._connection.send(request, sent, self._timeout)
                    code, content = response.status, await read(response, request.most_bytes)
                except (aiohttp.ClientError, TimeoutError, OSError) as e:
                    raise _no_response(e) from e
                finally:
                    self._metrics.calls.labels(request.verb, request.kind, str(code)).inc()
                    self._metrics.seconds.labels(request.verb).observe(time.monotonic() - started)
                if not 200 <= code <= 299:
                    raise error_of(code, content, response.headers)
                return _object(content), len(content)
            except UnavailableError as e:
                if num_tries >= self._limits.tries:
                    errors.labels(request.verb, request.kind, type(e).__name__).inc()
                    raise
                await self._sleep(self._limits.delay(num_tries, e.retry_after))
            except (NotFoundError, ConflictError, GoneError):  # these are answers
                raise
            except ClusterError as e:
                errors.labels(request.verb, request.kind, type(e).__name__).inc()
                raise


def _encoded(request: ApiRequest) -> bytes | None:
    if request.body is None:
        return None
    if request.content_type == APPLY:
        return encoded_as_yaml(request.body)
    # A ControllerRevision's data is kept byte for byte, and every later patch is refused if
    # the API server writes it otherwise.
    return encoded_as_stored(request.body) if request.verb == "create" else encoded(request.body)


def _no_response(error: Exception) -> UnavailableError:
    return UnavailableError(f"the API server does not answer: {no_answer(error)}")


def _object(content: bytes) -> Body:
    try:
        body = decoded(content)
    except ValueError as e:
        message = "the API server's answer is not JSON; is there a proxy in between?"
        raise UnavailableError(message) from e
    if not isinstance(body, dict):
        message = "the API server's answer is not an object; is there a proxy in between?"
        raise UnavailableError(message)
    return body
