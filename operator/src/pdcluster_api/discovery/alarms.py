"""The alarms of an etcd: whether it is full, and takes no writes any more.

It answers reads and renews leases all the same, so nothing else shows it.
"""

from collections.abc import Sequence

from aetcd import rpc

from pdcluster_api.discovery.etcd import TIMEOUT_SECONDS, Endpoint, EtcdTLS, call_each
from pdcluster_api.errors import EtcdUnreachableError


async def is_full(endpoints: Sequence[Endpoint], tls: EtcdTLS | None = None) -> bool:
    """Return whether the alarm NOSPACE is raised; an etcd that keeps its alarms to itself has none.

    Any member's alarm is known to all of them.
    """
    request = rpc.AlarmRequest(action=rpc.AlarmRequest.GET)
    try:
        response = await call_each(
            endpoints,
            tls,
            lambda etcd: etcd.Alarm(request, timeout=TIMEOUT_SECONDS),
            stub=rpc.MaintenanceStub,
        )
    except EtcdUnreachableError:
        return False
    return any(each.alarm == rpc.NOSPACE for each in response.alarms)
