"""Fakes of model, network and clock for engine tests, small enough to check by hand."""

from pdcluster_worker.testing.network import FakeNetwork, FakeTransport
from pdcluster_worker.testing.runner import FakeClock, FakeRunner

__all__ = ["FakeClock", "FakeNetwork", "FakeRunner", "FakeTransport"]
