"""The PDPoolScaler object: the scale of one pool, for `kubectl scale`, HPA and KEDA.

The operator creates one for each pool and owns it; `spec.replicas` is the request, by its last
writer.
"""

from typing import Annotated, Literal, TypedDict

from annotated_types import MaxLen, MinLen

from pdcluster_schema.crd.keywords import Crd
from pdcluster_schema.values import Replicas

ScalerName = Annotated[str, MinLen(1), MaxLen(63)]
Int32 = Annotated[int, Crd(format="int32")]


class PoolScalerSpec(TypedDict):
    """The pool, and its desired number of workers."""

    cluster: ScalerName
    """Name of the PDCluster in this namespace."""
    role: Literal["prefill", "decode", "mixed", "router"]
    """Role of the pool."""
    pool: ScalerName
    """Name of the pool."""
    replicas: Replicas
    """Workers that are asked for; the pool's minReplicas and maxReplicas bound what is run."""


class PoolScalerStatus(TypedDict, total=False):
    """Observed state; written by the operator alone."""

    replicas: Int32
    """Workers that exist."""
    selector: str
    """Labels of the pool's pods, as HPA reads them."""
