"""Small clusters and steady loads to replay."""

from typing import Any

from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDClusterSpec
from pdctl.replay.queueing import Speeds
from pdctl.replay.trace import Trace, TraceLoad

SPEEDS = Speeds(
    prefill_tokens_per_second=1000.0, step_seconds=0.02, kv_tokens=10_000.0, start_seconds=20.0
)


def make_spec(
    roles: dict[str, Any] | None = None, qos: dict[str, Any] | None = None, **autoscale: Any
) -> PDClusterSpec:
    pool = {"name": "x", "gpu": "H100", "replicas": 1, "minReplicas": 1, "maxReplicas": 6}
    spec = {
        "model": {"name": "tiny", "path": "/models/tiny"},
        "roles": roles or {"prefill": {"pools": [pool]}, "decode": {"pools": [pool]}},
        "qos": qos or {},
        "autoscale": {"scaleDown": {"windowSeconds": 60, "maxStep": 1}, **autoscale},
    }
    return parse(
        {
            "apiVersion": "pdcluster.io/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "chat"},
            "spec": spec,
        }
    ).spec


def steady(
    rate: float, seconds: float, input_tokens: float = 500.0, output_tokens: float = 100.0
) -> Trace:
    return Trace(
        tuple(TraceLoad(at, rate, input_tokens, output_tokens) for at in (0.0, seconds / 2))
    )
