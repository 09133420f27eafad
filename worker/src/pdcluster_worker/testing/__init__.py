"""Fakes of model, network and clock for engine tests, small enough to check by hand."""

from pdcluster_worker.testing.clock import FakeClock
from pdcluster_worker.testing.network import FakeNetwork, FakeTransport
from pdcluster_worker.testing.runner import FakeRunner

__all__ = ["FakeClock", "FakeNetwork", "FakeRunner", "FakeTransport"]
