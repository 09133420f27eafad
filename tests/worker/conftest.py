"""Fixtures of several rooms of the worker."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pdcluster_worker.config.worker import TLSConfig
from tests.make_tiny_model import make_tiny_model
from tests.system.certificates import make_certificates


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model by kind, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_tiny_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TLSConfig:
    """Certificates of one cluster."""
    return TLSConfig(**make_certificates(tmp_path_factory.mktemp("tls") / "ours").settings())
