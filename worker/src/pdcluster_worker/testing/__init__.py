"""Stand-ins for the model, the network and the clock, for tests of the engine; exact, and small
enough to check by hand.
"""

from pdcluster_worker.testing.clock import FakeClock
from pdcluster_worker.testing.network import FakeNetwork, FakeTransport
from pdcluster_worker.testing.runner import FakeRunner

__all__ = ["FakeClock", "FakeNetwork", "FakeRunner", "FakeTransport"]
