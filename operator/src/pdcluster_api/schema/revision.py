"""The revision: a short name for everything that a worker's pod and engine file are made of.

Workers of one revision may talk; those of another live under another etcd
prefix and never meet.  Policy, the Service's port, replicas, and which pools
there are do not count: a pool can come and go, and keeps its gpu for its life.
Nor do definitions of accelerators, which come and go with pools, and which
no edit changes (the CRD holds both).  Values that are the default do not count
either, so that an operator that knows one more field gives every object the
revision it had.
"""

import hashlib
import json
from typing import Any

from pdcluster_api.schema.names import REVISION_LENGTH
from pdcluster_api.schema.pdcluster import PDClusterSpec
from pdcluster_api.schema.section import Section


def revision_of(spec: PDClusterSpec) -> str:
    """First hexadecimal digits of a hash over all that a worker's pod is made of."""
    canonical = json.dumps(_relevant(spec), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:REVISION_LENGTH]


def _relevant(spec: PDClusterSpec) -> dict[str, Any]:
    etcd = spec.discovery.etcd
    return {
        "model": _given(spec.model),
        "image": _given(spec.image),
        "etcd": [etcd.endpoints, etcd.tls_secret],
        "apiKeys": spec.service.api_key_secret,
        "placement": spec.placement and _given(spec.placement),
        "grace": spec.rollout.grace_period_seconds,
        "podTemplate": spec.pod_template,
        "roles": {
            name: {
                "engine": _given(spec.engine_of(name)),
                "resources": _given(role.resources),
                "podTemplate": role.pod_template,
            }
            for name, role in spec.roles.present().items()
        },
    }


def _given(section: Section) -> dict[str, Any]:
    """The values that differ from the defaults."""
    return section.model_dump(exclude_defaults=True)
