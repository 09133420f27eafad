"""A real Envoy, from the environment that `bench/peers/install_envoy.sh` makes, as
examples/gateway/envoy.yaml sets it up.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.ports import free_port
from tests.system.client import Client
from tests.system.waiting import wait_for

FOLDER = Path.home() / ".cache" / "pdcluster" / "envoy"
EXAMPLE = Path(__file__).parents[2] / "examples" / "gateway" / "envoy.yaml"
READY_SECONDS = 30.0


def envoy_config(listen: str, picker: str, **modes: str) -> dict[str, Any]:
    """The example's, with these addresses.  modes: of `processing_mode`, over the example's."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    (listener,), (_, upstream) = (
        document["static_resources"][name] for name in ("listeners", "clusters")
    )
    listener["address"] = _address(listen)
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"][0]["typed_config"]["processing_mode"] |= modes
    (endpoint,) = upstream["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint["endpoint"]["address"] = _address(picker)
    return document


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def envoy_command(config: Path) -> list[str]:
    options = ["--concurrency", "1", "-l", "warning", "--use-dynamic-base-id"]
    return [str(FOLDER / "bin" / "envoy"), "-c", str(config), *options]


@contextmanager
def envoy_before(picker_port: int, folder: Path, **modes: str) -> Iterator[Client]:
    """A client of it."""
    port = free_port()
    config = folder / f"envoy-{port}.yaml"
    document = envoy_config(f"127.0.0.1:{port}", f"127.0.0.1:{picker_port}", **modes)
    config.write_text(yaml.safe_dump(document))
    with (folder / "envoy.log").open("ab") as log:
        process = subprocess.Popen(envoy_command(config), stdout=log, stderr=log)
    client = Client(f"http://127.0.0.1:{port}")
    try:
        wait_for(lambda: _answers(client), READY_SECONDS, "Envoy listens")
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


def _answers(client: Client) -> bool:
    try:
        return client.http.get("/v1/models").status_code == 200
    except httpx.TransportError:
        return False
