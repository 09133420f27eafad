"""The gRPC server of a worker: mutual TLS, one port, a bounded end."""

import grpc

from pdcluster_schema.addresses import join_address
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.peers.options import SERVER_OPTIONS
from pdcluster_worker.peers.service import WorkerService
from pdcluster_worker.peers.tls import Credentials
from pdcluster_worker.proto.worker_pb2_grpc import add_WorkerServicer_to_server


async def start_grpc(
    service: WorkerService, host: str, port: int, credentials: Credentials
) -> tuple[grpc.aio.Server, int]:
    """Listen on `port` (0: any free one); returns the server, to be ended by its
    `stop(grace_seconds)`, and the port.

    Raises ConfigError when the address cannot be used.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_WorkerServicer_to_server(service, server)
    address = join_address(host, port)
    try:
        bound_port = server.add_secure_port(address, credentials.server())
    except RuntimeError as e:
        raise ConfigError(
            f"listen.grpc: {address} cannot be used: taken or not ours; choose another port, or 0 "
            "for any"
        ) from e
    await server.start()
    return server, bound_port
