"""Fixtures of several rooms of the worker."""

import pytest

from pdcluster_worker.config.worker import TLSConfig
from tests.system.certificates import make_certificates


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TLSConfig:
    """Certificates of one cluster."""
    return TLSConfig(**make_certificates(tmp_path_factory.mktemp("tls") / "ours").settings())
