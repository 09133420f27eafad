"""Connections to one API server. The Kubernetes client reads the configuration and renews tokens;
its own sending is as slow as all of aiohttp's.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from pdcluster_api.apiserver.errors import UnavailableError
from pdcluster_api.apiserver.kubernetes_client import (
    ConfigException,
    Configuration,
    RESTClientObject,
)
from pdcluster_schema.labels import FIELD_MANAGER

JSON = "application/json"


@dataclass(frozen=True)
class ApiRequest:
    """One request."""

    verb: str  # of Kubernetes (get, list, create, patch, delete)
    kind: str  # for metrics, messages
    method: str
    path: str
    query: Mapping[str, str]
    body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    content_type: str = JSON
    most_bytes: int | None = None  # of the answer; None = any number


class ApiConnection:
    """A pool of connections.  Make it on a running loop, and `close` it.

    proxies: those of the environment count
    """

    def __init__(self, configuration: Configuration, *, proxies: bool = True) -> None:
        # which has the TLS of the configuration, and connects nothing by itself
        context = RESTClientObject(configuration).ssl_context
        self._configuration = configuration
        self._fixed = {"User-Agent": FIELD_MANAGER, "Accept": JSON}
        proxy = configuration.proxy or (_proxy_for(configuration.host) if proxies else None)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=configuration.connection_pool_maxsize, ssl=context
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            proxy=proxy,
            # which would also send passwords of a .netrc
            trust_env=False,
        )

    async def send(
        self, request: ApiRequest, body: bytes | None, timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """Send a request; returns when the head of its answer is there.  Raises
        aiohttp.ClientError, TimeoutError and OSError, and UnavailableError when our token cannot be
        read, as from a file that is being written.
        """
        headers = {**self._fixed, "Content-Type": request.content_type}
        token = await self._token()
        if token:
            headers["Authorization"] = token
        return await self._session.request(
            request.method,
            URL(self._configuration.host + request.path).with_query(request.query),
            headers=headers,
            data=body,
            timeout=timeout,
            server_hostname=self._configuration.tls_server_name or None,
            proxy_headers=self._configuration.proxy_headers,
        )

    async def close(self) -> None:
        await self._session.close()

    async def _token(self) -> str | None:
        try:
            return await self._configuration.get_api_key_with_prefix(
                "BearerToken", alias="authorization"
            )
        except ConfigException as e:
            raise UnavailableError(f"no credentials for the API server: {e}") from e


def _proxy_for(host: str) -> str | None:
    """Proxy that the environment names for a URL; None = none.  One that is reached by TLS does not
    count: the cluster's CA would have to know it.
    """
    url = URL(host)
    if url.host is None or proxy_bypass(url.host):
        return None
    proxy = getproxies().get(url.scheme)
    return None if proxy is None or URL(proxy).scheme == "https" else proxy


class LongResponseError(Exception):
    """An answer has more bytes than were to be read of it."""


async def lines_of(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines as they come; aiohttp's own end the connection at one that is longer than a buffer."""
    begun = bytearray()
    async for chunk in content.iter_any():
        begun += chunk
        if b"\n" in chunk:
            *lines, rest = bytes(begun).split(b"\n")
            begun = bytearray(rest)
            for line in lines:
                yield line
    if begun:
        yield bytes(begun)


async def read(response: aiohttp.ClientResponse, most: int | None) -> bytes:
    """All of an answer.  most: bytes; None = any number.  Raises LongResponseError."""
    if most is None:
        return await response.read()
    content = bytearray()
    async with response:
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > most:
                response.close()
                raise LongResponseError
    return bytes(content)
