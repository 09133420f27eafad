"""The way to the API server, with a proxy in the environment that nothing listens at."""

from base64 import b64encode
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.client import ApiClient, ClientLimits
from pdcluster_api.apiserver.connection import ApiConnection, ApiMetrics, Configuration, connect
from pdcluster_api.apiserver.errors import UnavailableError
from pdcluster_api.apiserver.kinds import SERVICE
from pdcluster_api.errors import StartError
from tests.operator.pdcluster_api.apiserver.answering_server import AnsweringServer, says

BODY = {"metadata": {"name": "chat", "namespace": "x"}}


def kubeconfig(folder: Path, url: str, token: str | None = None) -> Path:
    context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
    clusters = [{"name": "test", "cluster": {"server": url}}]
    found = {
        "current-context": "test",
        "contexts": [context],
        "clusters": clusters,
        "users": [{"name": "test", "user": {"token": token} if token else {}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **found}))
    return path


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")


async def test_proxies_of_the_environment_count_where_they_are_enabled(tmp_path: Path):
    async with AnsweringServer([says(200, BODY)]) as server:
        connection = await connect(kubeconfig(tmp_path, server.url))
        async with ApiClient(
            connection, ApiMetrics(CollectorRegistry()), ClientLimits(tries=1)
        ) as client:
            with pytest.raises(UnavailableError, match="does not answer"):
                await client.get(SERVICE, "x", "chat")
        assert server.seen == []


async def test_without_proxies_the_way_is_straight(tmp_path: Path):
    async with AnsweringServer([says(200, BODY)]) as server:
        connection = await connect(kubeconfig(tmp_path, server.url), proxies=False)
        async with ApiClient(connection, ApiMetrics(CollectorRegistry())) as client:
            assert await client.get(SERVICE, "x", "chat") == BODY


@pytest.mark.parametrize("token", [None, "secret"])
async def test_a_password_in_a_netrc_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str | None
):
    (tmp_path / "netrc").write_text("default login alice password hidden\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    sent: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        sent.append(request.headers.get("Authorization"))
        return web.json_response(BODY)

    async with AnsweringServer([answer]) as server:
        connection = await connect(kubeconfig(tmp_path, server.url, token))
        async with ApiClient(connection, ApiMetrics(CollectorRegistry())) as client:
            await client.get(SERVICE, "x", "chat")
    assert sent == [token and f"Bearer {token}"]


async def test_a_proxy_of_the_environment_gets_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sent: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        sent.append((str(request.url), request.headers["Proxy-Authorization"]))
        return web.json_response(BODY)

    async with AnsweringServer([answer]) as server:
        monkeypatch.setenv("http_proxy", server.url.replace("//", "//alice:a%20b@"))
        connection = await connect(kubeconfig(tmp_path, "http://example.invalid"))
        async with ApiClient(connection, ApiMetrics(CollectorRegistry())) as client:
            assert await client.get(SERVICE, "x", "chat") == BODY
    url = "http://example.invalid/api/v1/namespaces/x/services/chat"
    assert sent == [(url, "Basic " + b64encode(b"alice:a b").decode())]


async def test_a_proxy_that_is_reached_by_tls_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("http_proxy", "https://127.0.0.1:1")
    async with AnsweringServer([says(200, BODY)]) as server:
        connection = await connect(kubeconfig(tmp_path, server.url))
        async with ApiClient(connection, ApiMetrics(CollectorRegistry())) as client:
            assert await client.get(SERVICE, "x", "chat") == BODY


async def test_a_token_file_that_is_empty_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first")
    authority.write_text("a certificate")
    async with AnsweringServer([says(200, BODY)]) as server:
        configuration = Configuration()
        environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
        loader = InClusterConfigLoader(str(token), str(authority), environ=environment)
        loader.load_and_set(configuration)
        configuration.host, configuration.ssl_ca_cert = server.url, None
        connection = ApiConnection(configuration, proxies=False)
        async with ApiClient(
            connection, ApiMetrics(CollectorRegistry()), ClientLimits(tries=1)
        ) as client:
            loader.host, loader.ssl_ca_cert = server.url, None
            loader.token_expires_at = datetime.min
            token.write_text("")
            with pytest.raises(UnavailableError, match=r"no credentials .* Token file .* empty"):
                await client.get(SERVICE, "x", "chat")
            with pytest.raises(UnavailableError, match="no credentials"):
                await anext(client.lines(SERVICE, "x", {}, 1.0))
            token.write_text("second")
            assert await client.get(SERVICE, "x", "chat") == BODY


@pytest.mark.parametrize("text", [None, "", "not: a kubeconfig", "{"])
async def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path: Path, text: str | None):
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    with pytest.raises(
        StartError,
        match=r"kubeconfig .*kubeconfig cannot be used: (?s:.*); set KUBECONFIG to a working file",
    ) as e:
        await connect(path)
    assert e.value.exit_code == 2


async def test_without_a_kubeconfig_and_outside_a_pod_there_is_no_connection(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(StartError, match="not in a pod with a ServiceAccount"):
        await connect(None)
