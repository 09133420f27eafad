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
class PemPaths:
    """setting: the section of the engine file that names them.  certificate and key: both or
    neither.
    """

    setting: str
    ca: str
    certificate: str | None
    key: str | None


@dataclass(frozen=True, slots=True)
class Pem:
    """ca: may hold several authorities, each of them accepted."""

    ca: bytes
    certificate: bytes | None
    key: bytes | None


class PemFiles:
    """`current` is in force.  Raises ConfigError if the first reading fails."""

    def __init__(self, paths: PemPaths) -> None:
        self._paths = paths
        self.current = _read(paths)
        self._refused = ""
        _check(paths)

    def reload(self) -> bool:
        """True if other files are in force now."""
        try:
            content = _read(self._paths)
            if content == self.current:
                return False
            _check(self._paths)
            if content != _read(self._paths):
                return False  # caught in the middle of a change: the next look finds it whole
        except ConfigError as e:
            self._refuse(str(e))
            return False
        self.current, self._refused = content, ""
        logger.info("certificates reloaded setting=%s", self._paths.setting)
        return True

    def _refuse(self, reason: str) -> None:
        if reason != self._refused:
            logger.error("refused changed certificates, the last good ones stay reason=%s", reason)
        self._refused = reason


class Credentials:
    """Certificates for workers that connect to us (`server`), and that we connect to (`channel`).

    Raises ConfigError when the files cannot be used at the start.
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
        self._files = PemFiles(PemPaths("discovery.tls", config.ca, config.certificate, config.key))

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


def _read(paths: PemPaths) -> Pem:
    if (paths.certificate is None) != (paths.key is None):
        raise ConfigError(
            f"{paths.setting}: certificate and key belong together: give both, or neither"
        )
    ca = _read_file(f"{paths.setting}.ca", paths.ca)
    if paths.certificate is None or paths.key is None:
        return Pem(ca, None, None)
    certificate = _read_file(f"{paths.setting}.certificate", paths.certificate)
    return Pem(ca, certificate, _read_file(f"{paths.setting}.key", paths.key))


def _read_file(name: str, path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"{name}: {path} cannot be read: {e.strerror}") from e
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{name}: {path} is not a PEM file")
    return content


def _check(paths: PemPaths) -> None:
    setting, context = paths.setting, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(paths.ca)
    except (ssl.SSLError, OSError) as e:
        raise ConfigError(f"{setting}.ca: {paths.ca} holds no CA certificate: {e}") from e
    if paths.certificate is None:
        return
    try:
        # An encrypted key must be an error, not a question on the terminal.
        context.load_cert_chain(paths.certificate, paths.key, password=lambda: "")
    except (ssl.SSLError, ValueError, OSError) as e:
        both = f"{paths.certificate} and {paths.key}"
        raise ConfigError(
            f"{setting}.certificate, {setting}.key: {both} are not a certificate and its key: {e}"
        ) from e
