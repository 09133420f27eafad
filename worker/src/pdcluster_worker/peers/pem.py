"""PEM files of one end of a TLS connection, read again while the worker runs.

The files are checked when they are read, key against certificate included:
gRPC itself would find out only when the first peer connects, and say little.
A change that cannot be used is logged, and the last good files stay in force.
"""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from pdcluster_worker.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PemPaths:
    """Paths of the files.  setting: the section of the engine file that names them; certificate and
    key come together or not at all.
    """

    setting: str
    ca: str
    certificate: str | None
    key: str | None


@dataclass(frozen=True, slots=True)
class Pem:
    """Contents: `ca` may hold several authorities, each of them accepted."""

    ca: bytes
    certificate: bytes | None
    key: bytes | None


class PemFiles:
    """`current` is what is in force.

    Raises ConfigError naming the setting, the file and the reason if the first reading fails.
    """

    def __init__(self, paths: PemPaths) -> None:
        self._paths = paths
        self.current = _read(paths)
        self._refused = ""
        _check(paths)

    def reload(self) -> bool:
        """Look once; True if other files are in force now."""
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
        """Say it once, not at every look."""
        if reason != self._refused:
            logger.error("refused changed certificates, the last good ones stay reason=%s", reason)
        self._refused = reason


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
