"""The kinds of objects that the operator reads or makes, in the order in which it writes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from pdcluster_schema.labels import GROUP
from pdcluster_schema.pdcluster import KIND

Body = dict[str, Any]


class Key(NamedTuple):
    """Namespace and name of a PDCluster."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


API_VERSION = f"{GROUP}/v1alpha1"


class ApplyStrategy(Enum):
    """Treatment of a kind by the operator (`writes.diff`)."""

    APPLIED = "applied"  # server-side apply, its drift reverted, deleted when not wanted
    RECORD = "record"  # created once; its content never changes, and it is deleted when not wanted
    KEPT = "kept"  # applied once, again only on request, and left to the owner reference to delete
    # created once, patched where it must change, since its spec is the user's; deleted when not
    # wanted
    REQUEST = "request"
    READ = "read"  # not made by us


@dataclass(frozen=True)
class Kind:
    """One kind.  name: unique, with its group where two groups have a kind of that name
    field: for which it is made, of another project's CRD, which an API server may lack
    """

    api_version: str
    name: str
    plural: str
    strategy: ApplyStrategy = ApplyStrategy.READ
    field: str = ""

    @property
    def is_optional(self) -> bool:
        return bool(self.field)

    @property
    def kind(self) -> str:
        """As its objects have it."""
        return self.name.partition(".")[0]

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """URL path of one object, of all of a namespace, or (namespace None) of all."""
        root = f"/{'apis' if '/' in self.api_version else 'api'}/{self.api_version}"
        place = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{place}/{self.plural}" + (f"/{name}" if name else "")

    def __str__(self) -> str:
        return self.name


PDCLUSTER = Kind(API_VERSION, KIND, "pdclusters")
POD = Kind("v1", "Pod", "pods")
NODE = Kind("v1", "Node", "nodes")
CORE_EVENT = Kind("v1", "Event", "events")
EVENT = Kind("events.k8s.io/v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")

SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts", ApplyStrategy.APPLIED)
SECRET = Kind("v1", "Secret", "secrets", ApplyStrategy.KEPT)
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps", ApplyStrategy.APPLIED)
CONTROLLER_REVISION = Kind(
    "apps/v1", "ControllerRevision", "controllerrevisions", ApplyStrategy.RECORD
)
NETWORK_POLICY = Kind(
    "networking.k8s.io/v1", "NetworkPolicy", "networkpolicies", ApplyStrategy.APPLIED
)
POD_DISRUPTION_BUDGET = Kind(
    "policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", ApplyStrategy.APPLIED
)
POOL_SCALER = Kind(API_VERSION, "PDPoolScaler", "pdpoolscalers", ApplyStrategy.REQUEST)
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments", ApplyStrategy.APPLIED)
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets", ApplyStrategy.APPLIED)
INFERENCE_POOL = Kind(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    "inferencepools",
    ApplyStrategy.APPLIED,
    field="service.endpointPicker",
)
POD_GROUP = Kind(
    "scheduling.x-k8s.io/v1alpha1",
    "PodGroup",
    "podgroups",
    ApplyStrategy.APPLIED,
    field="placement.gang",
)
VOLCANO_POD_GROUP = Kind(
    "scheduling.volcano.sh/v1beta1",
    "PodGroup.scheduling.volcano.sh",
    "podgroups",
    ApplyStrategy.APPLIED,
    field="placement.gang",
)
SERVICE = Kind("v1", "Service", "services", ApplyStrategy.APPLIED)

# Every kind of which the operator makes objects for a PDCluster, in the order of making
CHILDREN = (
    SERVICE_ACCOUNT,
    SECRET,
    CONFIG_MAP,
    CONTROLLER_REVISION,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    POOL_SCALER,
    DEPLOYMENT,
    POD_GROUP,
    VOLCANO_POD_GROUP,
    STATEFUL_SET,
    INFERENCE_POOL,
    SERVICE,
)

# The kinds whose controllers make pods, which use others of a PDCluster's objects
MAKE_PODS = frozenset({DEPLOYMENT, STATEFUL_SET})

CHILD_OF_NAME = {kind.name: kind for kind in CHILDREN}


def kind_name(body: Mapping[str, Any]) -> str:
    """`Kind.name` of a body."""
    name = f"{body['kind']}.{body['apiVersion'].partition('/')[0]}"
    return name if name in CHILD_OF_NAME else str(body["kind"])
