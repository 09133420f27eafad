"""Connections to one API server. The Kubernetes client reads the configuration and renews tokens;
its own sending is as slow as all of aiohttp's.
"""

import importlib.util
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import getproxies, proxy_bypass

import aiohttp
from prometheus_client import CollectorRegistry, Counter, Histogram
from yaml import YAMLError
from yarl import URL

from pdcluster_api.apiserver.errors import UnavailableError
from pdcluster_api.errors import StartError
from pdcluster_schema.labels import FIELD_MANAGER

# its asynchronous half, without the synchronous one, which `import kubernetes` brings too: 7 MiB of
# some 90 in each operator
if "kubernetes" not in sys.modules:
    _found = importlib.util.find_spec("kubernetes")
    assert _found is not None, "the package kubernetes is not installed"
    sys.modules["kubernetes"] = importlib.util.module_from_spec(_found)

from kubernetes.aio.client.configuration import Configuration as Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import list_kube_config_contexts as list_kube_config_contexts
from kubernetes.aio.config import load_incluster_config, load_kube_config
from kubernetes.aio.config.config_exception import ConfigException as ConfigException

MAX_CONNECTIONS = 32
JSON = "application/json"
_METHODS = {
    **dict.fromkeys(("get", "list", "watch"), "GET"),
    **dict.fromkeys(("apply", "patch"), "PATCH"),
    "create": "POST",
    "update": "PUT",
    "delete": "DELETE",
}


@dataclass(frozen=True)
class ApiRequest:
    verb: str  # of Kubernetes
    kind: str  # for metrics
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
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
            _METHODS[request.verb],
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


async def connect(
    kubeconfig: Path | None,
    context: str | None = None,
    *,
    proxies: bool = True,
    connections: int = MAX_CONNECTIONS,
) -> ApiConnection:
    """Open a connection pool; None = with the ServiceAccount of this pod, whose token is read
    again.

    context: of the kubeconfig; None = its current one
    proxies: those of the environment count
    connections: most at a time; 0 = no bound

    Raises StartError (exit code 2) when the file, or the pod's account, cannot be used.
    """
    configuration = Configuration()
    configuration.connection_pool_maxsize = connections
    try:
        if kubeconfig is None:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await load_kube_config(  # type: ignore[no-untyped-call]
                str(kubeconfig),
                context=context,
                client_configuration=configuration,
                persist_config=False,
            )
        return ApiConnection(configuration, proxies=proxies)
    # all that its reader raises of a wrong file
    except (ConfigException, YAMLError, OSError, ValueError, TypeError, KeyError) as e:
        source = f"kubeconfig {kubeconfig} cannot be used"
        if kubeconfig is None:
            source = "not in a pod with a ServiceAccount"
        raise StartError(
            f"{source}: {e}; set KUBECONFIG to a working file, or run in a pod", exit_code=2
        ) from e


class ApiMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter(
            "pdcluster_operator_api_calls",
            "Requests to the API server by HTTP status (0 = no answer), each try counted.",
            ["verb", "kind", "code"],
            registry=registry,
        )
        self.errors = Counter(
            "pdcluster_operator_api_errors",
            "Requests to the API server that failed for good, after all tries, by error.",
            ["verb", "kind", "error"],
            registry=registry,
        )
        self.seconds = Histogram(
            "pdcluster_operator_api_call_seconds",
            "Seconds of a request to the API server, each try for itself.",
            ["verb"],
            registry=registry,
        )
