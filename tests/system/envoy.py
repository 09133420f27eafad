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


def envoy_config(port: int, picker_port: int, **modes: str) -> dict[str, Any]:
    """The example's, which listens there.  modes: of `processing_mode`, over the example's."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    (listener,), (_, picker) = (
        document["static_resources"][name] for name in ("listeners", "clusters")
    )
    listener["address"]["socket_address"]["port_value"] = port
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"][0]["typed_config"]["processing_mode"] |= modes
    (endpoint,) = picker["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint["endpoint"]["address"]["socket_address"]["port_value"] = picker_port
    return document


def envoy_command(config: Path) -> list[str]:
    options = ["--concurrency", "1", "-l", "warning", "--use-dynamic-base-id"]
    return [str(FOLDER / "bin" / "envoy"), "-c", str(config), *options]


@contextmanager
def envoy_before(picker_port: int, folder: Path, **modes: str) -> Iterator[Client]:
    """A client of it."""
    port = free_port()
    config = folder / f"envoy-{port}.yaml"
    config.write_text(yaml.safe_dump(envoy_config(port, picker_port, **modes)))
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
