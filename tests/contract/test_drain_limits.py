"""Time limits of a drain that worker and `pdctl` have to agree on."""

from pdcluster_worker.processes import server_process
from pdcluster_worker.server.http.run import STALLED_SECONDS
from pdctl.local import processes


def test_stalled_client_is_given_up_before_a_process_that_is_to_end_is_killed() -> None:
    """`pdctl up` waits less than a pod's grace period is."""
    assert STALLED_SECONDS + server_process.HTTP_DRAIN_SECONDS < processes.DRAIN_SECONDS
