"""Wrong certificate files are said at the start, and name the setting."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdcluster_worker.errors import ConfigError
from pdcluster_worker.peers.tls import Credentials


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_missing_file_is_refused_by_name(authority: Any, tmp_path: Path, name: str) -> None:
    config = msgspec.structs.replace(authority.issue(), **{name: str(tmp_path / "none.pem")})

    with pytest.raises(ConfigError, match=rf"tls\.{name}: .*none\.pem cannot be read"):
        Credentials(config)


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_file_that_is_not_pem_is_refused_by_name(authority: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "garbage.pem"
    path.write_bytes(b"\x00garbage")

    with pytest.raises(ConfigError, match=rf"tls\.{name}: .* is not a PEM file"):
        Credentials(msgspec.structs.replace(authority.issue(), **{name: str(path)}))


def test_broken_pem_is_refused(authority: Any, tmp_path: Path) -> None:
    path = tmp_path / "broken.pem"
    path.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")

    with pytest.raises(ConfigError, match=r"tls\.ca"):
        Credentials(msgspec.structs.replace(authority.issue(), ca=str(path)))


def test_key_of_another_certificate_is_refused(authority: Any) -> None:
    config = msgspec.structs.replace(authority.issue(), key=authority.issue().key)

    with pytest.raises(ConfigError, match="not a certificate and its key"):
        Credentials(config)
