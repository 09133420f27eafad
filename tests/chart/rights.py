"""The operator's rights by kind, as the chart has to grant them."""

READ = {"get", "list", "watch"}
KEPT = READ | {"create", "patch"}
OWNED = KEPT | {"delete"}


OBJECTS = {
    "pdcluster.io/pdclusters": READ,
    "pdcluster.io/pdclusters/status": {"patch"},
    "pdcluster.io/pdpoolscalers": OWNED,
    "pdcluster.io/pdpoolscalers/status": {"patch"},
    "apps/statefulsets": OWNED,
    "apps/deployments": OWNED,
    "apps/controllerrevisions": OWNED,
    "/services": OWNED,
    "/configmaps": OWNED,
    "/serviceaccounts": OWNED,
    "/secrets": KEPT,
    "policy/poddisruptionbudgets": OWNED,
    "networking.k8s.io/networkpolicies": OWNED,
    "inference.networking.k8s.io/inferencepools": OWNED,
    "scheduling.x-k8s.io/podgroups": OWNED,
    "scheduling.volcano.sh/podgroups": OWNED,
    "/pods": READ,
    "/events": {"list"},
    "events.k8s.io/events": {"create"},
}
