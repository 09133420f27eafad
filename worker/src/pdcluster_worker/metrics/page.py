"""The worker's Prometheus metrics, each defined once, in the module of what it measures.

Names are those of docs/contracts.md (`tests/contract`).  Attribute names are metric names
without the `pdcluster_` prefix and the `_total` suffix.  Engine counters arrive as cumulative
values in EngineStats and are moved forward by their difference (`serving.engines.metrics`).
"""

from pdcluster_worker.metrics.credits import CreditMetrics
from pdcluster_worker.metrics.device import DeviceMetrics
from pdcluster_worker.metrics.disaggregation import DisaggregationMetrics
from pdcluster_worker.metrics.grammars import GrammarMetrics
from pdcluster_worker.metrics.kv_cache import KVCacheMetrics
from pdcluster_worker.metrics.latency import LatencyMetrics
from pdcluster_worker.metrics.processes import ProcessMetrics
from pdcluster_worker.metrics.qos import QosMetrics
from pdcluster_worker.metrics.relaying import RelayingMetrics
from pdcluster_worker.metrics.requests import RequestMetrics
from pdcluster_worker.metrics.scheduling import SchedulingMetrics
from pdcluster_worker.metrics.speculation import SpeculationMetrics
from pdcluster_worker.metrics.steps import StepMetrics


class Metrics(
    LatencyMetrics,
    RequestMetrics,
    QosMetrics,
    GrammarMetrics,
    SchedulingMetrics,
    StepMetrics,
    SpeculationMetrics,
    ProcessMetrics,
    DeviceMetrics,
    KVCacheMetrics,
    DisaggregationMetrics,
    CreditMetrics,
    RelayingMetrics,
):
    """One registry and everything in it."""
