"""TLS of a worker: mutual with the other workers of its cluster, and to an etcd that speaks it.

Files are read again while the worker runs, and checked, key against certificate included: gRPC
would find out only when the first peer connects.  Open connections stay.
"""

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pdcluster_worker.config.worker import EtcdTLSConfig, TLSConfig
from pdcluster_worker.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
"""Period of looks at the files; little beside the minute or two in which a kubelet changes a
mounted Secret.
"""


@dataclass(frozen=True, slots=True)
class Pem:
    """ca: may hold several authorities, each of them accepted."""

    ca: bytes
    certificate: bytes | None
    key: bytes | None


class PemFiles:
    """`current` is in force.  Raises ConfigError if the first reading fails.

    setting: the section of the engine file that names them, certificate and key both or neither.
    """

    def __init__(self, setting: str, paths: TLSConfig | EtcdTLSConfig) -> None:
        self._setting = setting
        self._paths = paths
        self.current = _read(setting, paths)
        self._refused = ""
        _check(setting, paths)

    def reload(self) -> bool:
        """True if other files are in force now."""
        try:
            content = _read(self._setting, self._paths)
            if content == self.current:
                return False
            _check(self._setting, self._paths)
            if content != _read(self._setting, self._paths):
                return False  # caught in the middle of a change: the next look finds it whole
        except ConfigError as e:
            if str(e) != self._refused:
                logger.error("refused changed certificates, the last good ones stay reason=%s", e)
            self._refused = str(e)
            return False
        self.current, self._refused = content, ""
        logger.info("certificates reloaded setting=%s", self._setting)
        return True


class Credentials:
    """Certificates for workers that connect to us (`server`), and that we connect to (`channel`).

    Raises ConfigError when the files cannot be used at the start.
    """

    def __init__(self, config: TLSConfig) -> None:
        self._files = PemFiles("tls", config)
        self.channel = _channel(self._files.current)

    def server(self, *, of_peers: bool = True) -> grpc.ServerCredentials:
        """Credentials of one server: gRPC keeps in them what it was last given.

        of_peers: a client has to show a certificate of ours.
        """
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
            _server(shown), newer, require_client_authentication=of_peers
        )

    def reload(self) -> bool:
        """True if other files are in force now, and `channel` is another object."""
        if not self._files.reload():
            return False
        self.channel = _channel(self._files.current)
        return True

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.reload()


class EtcdCredentials:
    """Raises ConfigError like `Credentials`."""

    def __init__(self, config: EtcdTLSConfig) -> None:
        self._files = PemFiles("discovery.tls", config)

    def channel(self) -> grpc.ChannelCredentials:
        """Credentials of one connection, from the newest good files."""
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


def _read(setting: str, paths: TLSConfig | EtcdTLSConfig) -> Pem:
    if (paths.certificate is None) != (paths.key is None):
        raise ConfigError(f"{setting}: certificate and key belong together: give both, or neither")
    ca, certificate, key = (
        None if path is None else _read_file(f"{setting}.{name}", path)
        for name, path in (("ca", paths.ca), ("certificate", paths.certificate), ("key", paths.key))
    )
    assert ca is not None
    return Pem(ca, certificate, key)


def _check(setting: str, paths: TLSConfig | EtcdTLSConfig) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(paths.ca)
    except (ssl.SSLError, OSError) as e:
        raise ConfigError(f"{setting}.ca: {paths.ca} holds no CA certificate: {e}") from e
    if paths.certificate is not None:
        try:
            # An encrypted key must be an error, not a question on the terminal.
            context.load_cert_chain(paths.certificate, paths.key, password=lambda: "")
        except (ssl.SSLError, ValueError, OSError) as e:
            raise ConfigError(
                f"{setting}.certificate, {setting}.key: {paths.certificate} and {paths.key} are "
                f"not a certificate and its key: {e}"
            ) from e


def _read_file(name: str, path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"{name}: {path} cannot be read: {e.strerror}") from e
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{name}: {path} is not a PEM file")
    return content
