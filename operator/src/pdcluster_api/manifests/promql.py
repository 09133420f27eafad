"""PromQL for alerts and dashboards: templates in which `$scope` narrows a metric to one cluster.

The labels are those that the PodMonitor puts on every series; `namespace` and
`pod` come with Prometheus' own discovery.  A worker's own label `role` (of its
peers) arrives as `exported_role`.
"""

from pdcluster_api.manifests.objects import Owner

CLUSTER_LABEL = "pdcluster"  # `cluster` is what many installations call the Kubernetes cluster
WORKLOAD_LABELS = ("role", "pool", "revision")


def promql(template: str, owner: Owner, ingress_role: str) -> str:
    """A template about one cluster: `$scope` becomes label matchers, `$ingress` its ingress role."""
    scope = f'namespace="{owner.namespace}",{CLUSTER_LABEL}="{owner.name}"'
    return template.replace("$scope", scope).replace("$ingress", ingress_role)


def quantile(share: float, histogram: str, window: str, by: str = "") -> str:
    """Template: of a histogram over all workers, or for each value of the labels in `by` (as in `role, pool`)."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, sum by ({labels}) (rate(pdcluster_{histogram}_bucket{{$scope}}[{window}])))"


def share_above(histogram: str, bound: str, window: str) -> str:
    """Template: share of observations above one of the histogram's bounds, from 0 to 1; nothing where there were none."""
    below = f'sum(rate(pdcluster_{histogram}_bucket{{$scope,le="{bound}"}}[{window}]))'
    return f"(1 - {below} / sum(rate(pdcluster_{histogram}_count{{$scope}}[{window}])))"
