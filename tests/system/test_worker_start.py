"""A worker that cannot start says why and ends with 2 (3 where it has not its device).

One whose etcd is away waits and says so.
"""

import socket

import httpx
import pytest

from tests.ports import free_port
from tests.system.client import Client
from tests.system.etcd_server import EtcdServer
from tests.system.waiting import wait_for

START_SECONDS = 120.0


# the one of the server process, the other of the engine process
@pytest.mark.parametrize("kind", ["http", "kv"])
def test_taken_port_ends_with_2(new_cluster, kind):
    worker = new_cluster(f"port-{kind}").add_worker("decode", "decode-0", start=False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = worker.settings["listen"][kind] = other.getsockname()[1]
        worker.start()
        assert worker.wait_end() == 2
    assert "error: " in worker.log_tail(1)
    assert str(port) in worker.log_tail(1)


def test_etcd_away_at_start_means_not_ready_until_it_comes(new_cluster, tmp_path, prompts):
    cluster, etcd = new_cluster("early"), EtcdServer(tmp_path)
    cluster.etcd = etcd
    worker = cluster.add_worker("mixed", "mixed-0", start=False)
    # etcd is asked before the engine starts, and again to register
    worker.settings["model"]["dtype"] = "auto"
    port = worker.settings["listen"]["http"] = free_port()
    client = Client(f"http://127.0.0.1:{port}")
    try:
        worker.start()
        wait_for(
            lambda: "etcd" in reason(client),
            START_SECONDS,
            lambda: f"/ready names etcd, not {reason(client)!r}",
        )
        assert client.http.get("/health").status_code == httpx.codes.OK
        etcd.start()
        worker.wait_ready()
        assert len(worker.client.complete(prompts(20)).tokens) == 8
        ((key, dtype),) = etcd.values("/pdcluster/test/early/dtypes/").items()
        assert key == "/pdcluster/test/early/dtypes/r1"
        assert f" dtype={dtype.decode()} " in worker.log.read_text()
    finally:
        client.close()
        etcd.close()


def reason(client: Client) -> str:
    """Reason why the worker is not ready; "" when it is, or does not answer yet."""
    try:
        reply = client.http.get("/ready")
    except httpx.TransportError:
        return ""
    return reply.json()["reason"] or ""
