"""TLS of the connections that a worker has: mutual with the other workers of its cluster, and to an
etcd that speaks it.

Both ends show a certificate and accept only those of the authorities in their
CA file, so any other process gets no further than the handshake.  All files are read
again while the worker runs: new handshakes, of either side, go by the newest
good files, and connections that stand are left alone.  A cluster changes its
authority by accepting two for a while.
"""

import asyncio
import hashlib
import hmac
from typing import Any

import grpc

from pdcluster_worker.config.worker import EtcdTLSConfig, TLSConfig
from pdcluster_worker.peers.pem import Pem, PemFiles, PemPaths

CHECK_SECONDS = 5.0
"""Period of looks at the files; little beside the minute or two in which a kubelet changes a
mounted Secret.
"""


class Credentials:
    """Certificates that we show to the workers that connect to us (`server`), and to those that we
    connect to (`channel`).

    Raises ConfigError naming the setting, the file and the reason when the files cannot be used at
    the start.
    """

    def __init__(self, config: TLSConfig) -> None:
        self._files = PemFiles(PemPaths("tls", config.ca, config.certificate, config.key))
        self.channel = _channel(self._files.current)

    def server(self) -> grpc.ServerCredentials:
        """Credentials of one server: gRPC keeps in them what it was last given."""
        shown = self._files.current

        def newer() -> Any:
            """Called before each handshake, in a thread of gRPC's; None = as before."""
            nonlocal shown
            newest = self._files.current
            if newest is shown:
                return None
            shown = newest
            return _server(newest)

        return grpc.dynamic_ssl_server_credentials(
            _server(shown), newer, require_client_authentication=True
        )

    def proof(self, purpose: str) -> str:
        """Proof that a process has the cluster's private key: for a caller that is no worker and
        has no connection of gRPC (docs/contracts.md).
        """
        key = self._files.current.key
        assert key is not None  # TLSConfig demands it
        return hmac.new(key, purpose.encode(), hashlib.sha256).hexdigest()

    def reload(self) -> bool:
        """Look once; True if other files are in force now, and `channel` is another object."""
        if not self._files.reload():
            return False
        self.channel = _channel(self._files.current)
        return True

    async def watch(self) -> None:
        """Follow the files until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.reload()


class EtcdCredentials:
    """Certificates that etcd is shown; raises ConfigError like `Credentials`."""

    def __init__(self, config: EtcdTLSConfig) -> None:
        self._files = PemFiles(PemPaths("discovery.tls", config.ca, config.certificate, config.key))

    def channel(self) -> grpc.ChannelCredentials:
        """Credentials of one connection, from the files as they are now or were when they were last
        good.
        """
        self._files.reload()
        return _channel(self._files.current)


def _channel(pem: Pem) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=pem.ca, private_key=pem.key, certificate_chain=pem.certificate
    )


def _server(pem: Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.key is not None
    assert pem.certificate is not None  # TLSConfig demands both
    return grpc.ssl_server_certificate_configuration(
        [(pem.key, pem.certificate)], root_certificates=pem.ca
    )
