"""The InferencePool, by which gateways of the Gateway API find the workers that answer clients."""

from pdcluster_api.manifests.objects import HTTP_PORT, Manifest, Owner, new_object
from pdcluster_schema.labels import CLUSTER, REVISION, ROLE, cluster_labels
from pdcluster_schema.service import EndpointPickerSpec


def inference_pool(picker: EndpointPickerSpec, owner: Owner, serving: str, role: str) -> Manifest:
    """The pods of the ingress Service, and the endpoint picker that chooses among them."""
    spec = {
        "selector": {"matchLabels": {CLUSTER: owner.name, ROLE: role, REVISION: serving}},
        "targetPorts": [{"number": HTTP_PORT}],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": picker.name,
            "port": {"number": picker.port},
            "failureMode": picker.failure_mode,
        },
    }
    return new_object(
        "inference.networking.k8s.io/v1/InferencePool",
        owner.name,
        owner,
        cluster_labels(owner.name, "ingress"),
        spec=spec,
    )
