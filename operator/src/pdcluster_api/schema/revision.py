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
from functools import lru_cache
from typing import Any

from pdcluster_api.schema.names import REVISION_LENGTH
from pdcluster_api.schema.pdcluster import PDClusterSpec
from pdcluster_api.schema.section import Section
from pdcluster_api.schema.sections import PlacementSpec


def revision_of(spec: PDClusterSpec) -> str:
    """First hexadecimal digits of a hash over all that a worker's pod is made of."""
    return _revision_of(_Same(spec))


class _Same:
    """A spec that equals itself alone.  It is frozen, and one reconcile asks for its revision a
    dozen times.
    """

    def __init__(self, spec: PDClusterSpec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return id(self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.spec is other.spec


@lru_cache(maxsize=16)
def _revision_of(same: _Same) -> str:
    canonical = json.dumps(_relevant(same.spec), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:REVISION_LENGTH]


def _relevant(spec: PDClusterSpec) -> dict[str, Any]:
    etcd = spec.discovery.etcd
    return {
        "model": _given(spec.model),
        "image": _given(spec.image),
        "etcd": [etcd.endpoints, etcd.tls_secret],
        "apiKeys": spec.service.api_key_secret,
        "placement": _placement(spec.placement),
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


def _placement(placement: PlacementSpec | None) -> dict[str, Any] | None:
    """The part that pods are made of: how fast KV has to move is none."""
    if placement is None or placement.domain_label is None:
        return None
    return placement.model_dump(exclude_defaults=True, exclude={"min_transfer_gbps"})


def _given(section: Section) -> dict[str, Any]:
    """The values that differ from the defaults."""
    return section.model_dump(exclude_defaults=True)
