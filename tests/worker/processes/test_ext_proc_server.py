"""The server of an endpoint picker over gRPC and TLS, asked as a gateway asks it."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.ports import WORKER_NAME
from pdcluster_worker.config.worker import TLSConfig
from pdcluster_worker.errors import ConfigError, RequestError
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.peers.tls import Credentials
from pdcluster_worker.processes.ext_proc_server import ExtProcServer
from pdcluster_worker.proxy import ext_proc_messages as messages
from pdcluster_worker.proxy.endpoint_picker import EndpointPicker
from pdcluster_worker.proxy.picker import UpstreamState
from tests.system.certificates import make_certificates

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHECK = "/grpc.health.v1.Health/Check"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
LIVENESS = b"\x0a\x08liveness"


class Served:
    """A picker before one worker, and a gateway's channel to it."""

    def __init__(self, folder: Path) -> None:
        files = make_certificates(folder / "tls")
        self.credentials = Credentials(TLSConfig(**files.settings()))
        self.trusted = grpc.ssl_channel_credentials(files.ca.read_bytes())  # shows nothing
        self.is_draining = False
        refusal = RequestError("none", status=503, code="no_decode_worker", retry_after_seconds=2)
        self.picker = EndpointPicker(PolicyConfig, lambda: refusal, Metrics())
        self.picker.workers = lambda: [UpstreamState("a e", "a", "10.0.0.1:8000", True, 0)]
        self.picker.poll()
        self.server = ExtProcServer(self.picker, lambda: self.is_draining)

    async def start(self) -> None:
        self.port = await self.server.start("127.0.0.1", 0, self.credentials)
        options = [("grpc.ssl_target_name_override", WORKER_NAME)]
        address = f"127.0.0.1:{self.port}"
        self.channel = grpc.aio.secure_channel(address, self.trusted, options)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path)
    await served.start()
    yield served
    await served.channel.close()
    await served.server.close()


def head() -> bytes:
    request = messages.parse_request(b"")
    request.request_headers.end_of_stream = True
    return request.SerializeToString()


async def test_stream_ends_without_an_error_after_the_choice(served: Served):
    call = served.channel.stream_stream(PROCESS)()
    await call.write(head())
    assert [each async for each in call] == [messages.chosen("request_headers", "10.0.0.1:8000")]
    assert await call.code() == grpc.StatusCode.OK


async def test_message_that_cannot_be_read_ends_the_stream(served: Served):
    call = served.channel.stream_stream(PROCESS)()
    await call.write(b"\xff\xff")
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "not a ProcessingRequest" in await call.details()


async def test_health_follows_the_drain_and_liveness_does_not(served: Served):
    check = served.channel.unary_unary(CHECK)
    assert await check(b"") == SERVING
    served.is_draining = True
    assert await check(b"") == NOT_SERVING
    assert await check(LIVENESS) == SERVING


async def test_port_that_is_taken_is_named(served: Served):
    other = ExtProcServer(served.picker, lambda: False)
    with pytest.raises(ConfigError, match=r"listen\.picker: 127\.0\.0\.1:"):
        await other.start("127.0.0.1", served.port, served.credentials)
