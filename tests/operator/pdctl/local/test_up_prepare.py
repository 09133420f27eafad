"""Decision of `pdctl up` before it starts anything: the port."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdcluster_api.errors import StartError
from pdcluster_schema.load import parse
from pdctl.local.up import UpRequest, prepare


@pytest.fixture
def request_at(tmp_path: Path, document: dict[str, Any]) -> Callable[[int], UpRequest]:
    """A request for a port, with a model folder that is there."""
    document["spec"]["model"]["path"] = str(tmp_path)
    return lambda port: UpRequest(tmp_path / "chat.yaml", parse(document), port, tmp_path / "state")


def test_prepare_turns_port_0_into_one_that_a_restart_keeps(
    request_at: Callable[[int], UpRequest],
) -> None:
    plan = prepare(request_at(0)).plan

    assert plan.ingress.http_port > 0
    assert [process.http_port for process in plan.processes if process is not plan.ingress] == [0]


def test_prepare_keeps_a_port_that_was_given(request_at: Callable[[int], UpRequest]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} is taken"):
            prepare(request_at(port))

    assert prepare(request_at(port)).plan.ingress.http_port == port
