"""The way to the API server, with a proxy in the environment that nothing listens at."""

from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.client import ApiClient, Limits
from pdcluster_api.apiserver.connect import connect
from pdcluster_api.apiserver.errors import UnavailableError
from pdcluster_api.apiserver.kinds import SERVICE
from pdcluster_api.apiserver.metrics import ApiMetrics
from tests.operator.pdcluster_api.apiserver.answering_server import AnsweringServer, says

BODY = {"metadata": {"name": "chat", "namespace": "x"}}


def kubeconfig(folder: Path, url: str) -> Path:
    context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
    clusters = [{"name": "test", "cluster": {"server": url}}]
    found = {
        "current-context": "test",
        "contexts": [context],
        "clusters": clusters,
        "users": [{"name": "test", "user": {}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **found}))
    return path


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")


async def test_proxies_of_the_environment_count_where_they_are_asked_for(tmp_path: Path):
    async with AnsweringServer([says(200, BODY)]) as server:
        connection = await connect(kubeconfig(tmp_path, server.url))
        async with ApiClient(
            connection, ApiMetrics(CollectorRegistry()), Limits(tries=1)
        ) as client:
            with pytest.raises(UnavailableError, match="does not answer"):
                await client.get(SERVICE, "x", "chat")
        assert server.seen == []


async def test_without_proxies_the_way_is_straight(tmp_path: Path):
    async with AnsweringServer([says(200, BODY)]) as server:
        connection = await connect(kubeconfig(tmp_path, server.url), proxies=False)
        async with ApiClient(connection, ApiMetrics(CollectorRegistry())) as client:
            assert await client.get(SERVICE, "x", "chat") == BODY
