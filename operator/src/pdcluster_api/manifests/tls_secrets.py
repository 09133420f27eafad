"""The two Secrets of a cluster's certificates: the authority with its key, mounted nowhere, and
what workers mount.
"""

import base64
from collections.abc import Mapping

from pdcluster_api.manifests.child_names import child_names
from pdcluster_api.manifests.objects import Manifest, Owner, new_object
from pdcluster_schema.labels import cluster_labels

_NO_ANNOTATIONS: Mapping[str, str] = {}


def render_tls_secrets(
    owner: Owner,
    ca: Mapping[str, bytes],
    tls: Mapping[str, bytes],
    *,
    ca_annotations: Mapping[str, str] = _NO_ANNOTATIONS,
    tls_annotations: Mapping[str, str] = _NO_ANNOTATIONS,
) -> tuple[Manifest, Manifest]:
    """The authority's and the workers', to be written in this order.

    ca:  tls.crt and tls.key of the authority, PEM
    tls: ca.crt (every authority that is accepted), tls.crt and tls.key of the workers, PEM
    """
    names = child_names(owner.name)
    return _secret(owner, names.authority, ca, ca_annotations), _secret(
        owner, names.certificates, tls, tls_annotations
    )


def _secret(
    owner: Owner, name: str, content: Mapping[str, bytes], annotations: Mapping[str, str]
) -> Manifest:
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    labels = cluster_labels(owner.name, "ingress")
    return new_object(
        "v1/Secret",
        name,
        owner,
        labels,
        annotations=annotations,
        type="kubernetes.io/tls",
        data=data,
    )
