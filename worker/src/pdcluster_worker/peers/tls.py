"""Mutual TLS between the workers of one cluster, from three PEM files.

Both ends show a certificate and accept only those of the cluster's CA, so a
stranger gets no further than the handshake.  The files are checked when they
are read, key against certificate included: gRPC itself would find out only
when the first peer connects, and say little.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from pdcluster_worker.config import TLSConfig
from pdcluster_worker.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who we are to those that connect to us, and to those that we connect to."""

    server: grpc.ServerCredentials
    channel: grpc.ChannelCredentials


def load_credentials(config: TLSConfig) -> Credentials:
    """Read and check the files.  Raises ConfigError naming the setting, the file and the reason."""
    ca, certificate, key = (_read(name, getattr(config, name)) for name in ("ca", "certificate", "key"))
    _check(config)
    return Credentials(
        server=grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca, require_client_auth=True),
        channel=grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate),
    )


def _read(name: str, path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"tls.{name}: {path} cannot be read: {e.strerror}") from e
    if b"-----BEGIN " not in content:
        raise ConfigError(f"tls.{name}: {path} is not a PEM file")
    return content


def _check(config: TLSConfig) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(config.ca)
    except ssl.SSLError as e:
        raise ConfigError(f"tls.ca: {config.ca} holds no CA certificate: {e}") from e
    try:
        # An encrypted key must be an error, not a question on the terminal.
        context.load_cert_chain(config.certificate, config.key, password=lambda: "")
    except (ssl.SSLError, ValueError) as e:
        raise ConfigError(f"tls.certificate, tls.key: {config.certificate} and {config.key} are not a certificate and its key: {e}") from e
