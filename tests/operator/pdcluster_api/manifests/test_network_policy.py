"""Reachable ports, evaluated from the rendered policies as a network plugin would."""

from typing import Any

import pytest

from pdcluster_api.manifests.render import Manifest
from pdcluster_schema.ports import MAX_ENGINES, MAX_RANKS, NUM_UCX_PORTS
from tests.operator.pdcluster_api.manifests.rendering import SITE, matches, pod_of, shared_of
from tests.schema.object_cases import at

HTTP, GRPC, KV, ETCD_CLIENT, ETCD_PEER = 8000, 9000, 9100, 2379, 2380
Peer = tuple[str, dict[str, str]]  # namespace and labels

DECODE: Peer = ("serving", pod_of()["metadata"]["labels"])
PREFILL: Peer = ("serving", pod_of(role="prefill")["metadata"]["labels"])
ETCD: Peer = (
    "serving",
    shared_of()["Deployment", "chat-etcd"]["spec"]["template"]["metadata"]["labels"],
)
NAMESAKE: Peer = ("elsewhere", DECODE[1])
OTHER_CLUSTER: Peer = ("serving", {**DECODE[1], "pdcluster.io/cluster": "other"})
STRANGER: Peer = ("serving", {"app": "client"})
OPERATOR: Peer = (SITE.operator_namespace, {"app": "operator"})

CASES = [
    (STRANGER, DECODE, HTTP, True),
    (NAMESAKE, PREFILL, HTTP, True),
    (PREFILL, DECODE, KV, True),
    # each rank of each engine has a port; UCX's are behind them
    (PREFILL, DECODE, KV + MAX_ENGINES * MAX_RANKS - 1, True),
    (PREFILL, DECODE, KV + MAX_ENGINES * MAX_RANKS + NUM_UCX_PORTS - 1, True),
    (PREFILL, DECODE, KV + MAX_ENGINES * MAX_RANKS + NUM_UCX_PORTS, False),
    (STRANGER, DECODE, KV + 1, False),
    (DECODE, PREFILL, GRPC, True),
    (DECODE, DECODE, GRPC, True),
    (STRANGER, DECODE, GRPC, False),
    (OTHER_CLUSTER, DECODE, KV, False),
    (NAMESAKE, DECODE, GRPC, False),
    (ETCD, DECODE, GRPC, False),
    (OPERATOR, DECODE, KV, False),
    (STRANGER, DECODE, 22, False),
    (DECODE, ETCD, ETCD_CLIENT, True),
    (PREFILL, ETCD, ETCD_CLIENT, True),
    (OPERATOR, ETCD, ETCD_CLIENT, True),
    (STRANGER, ETCD, ETCD_CLIENT, False),
    (OTHER_CLUSTER, ETCD, ETCD_CLIENT, False),
    (NAMESAKE, ETCD, ETCD_CLIENT, False),
    (ETCD, ETCD, ETCD_PEER, True),
    (DECODE, ETCD, ETCD_PEER, False),
    (OPERATOR, ETCD, ETCD_PEER, False),
    (STRANGER, STRANGER, 22, True),
]


def policies() -> list[Manifest]:
    return [manifest for (kind, _), manifest in shared_of().items() if kind == "NetworkPolicy"]


def is_open(source: Peer, target: Peer, port: int) -> bool:
    """Kubernetes' rule: a pod that policies select is reached only as one of them allows."""
    selecting = [
        policy["spec"]
        for policy in policies()
        if target[0] == "serving" and matches(policy["spec"]["podSelector"], target[1])
    ]
    rules = [rule for spec in selecting for rule in spec["ingress"]]
    return not selecting or any(
        any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"])
        and ("from" not in rule or any(allows(peer, source) for peer in rule["from"]))
        for rule in rules
    )


def allows(peer: dict[str, Any], source: Peer) -> bool:
    """Return whether one `from` matches: pods of the policy's namespace, or all pods of selected
    namespaces.
    """
    if "namespaceSelector" in peer:
        assert "podSelector" not in peer
        return matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source[0]})
    return source[0] == "serving" and matches(peer["podSelector"], source[1])


@pytest.mark.parametrize(("source", "target", "port", "expected"), CASES)
def test_port_is_open_to_the_pods_that_need_it(
    source: Peer, target: Peer, port: int, expected: bool
) -> None:
    assert is_open(source, target, port) is expected


def test_policies_can_be_left_out() -> None:
    assert not [
        kind
        for kind, _ in shared_of(at("spec.networkPolicy.enabled", False))
        if kind == "NetworkPolicy"
    ]


def test_external_etcd_has_no_policy() -> None:
    shared = shared_of(at("spec.discovery.etcd", {"endpoints": ["etcd:2379"]}))

    assert [name for kind, name in shared if kind == "NetworkPolicy"] == ["chat-pdc"]
