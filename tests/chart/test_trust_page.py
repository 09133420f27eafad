"""docs/trust.md says what is: the lines that code can hold, beside that code."""

import re
from pathlib import Path

import yaml

from pdcluster_api.manifests.objects import ETCD_CLIENT_PORT, ETCD_PEER_PORT, Manifest
from pdcluster_schema.ports import GRPC_PORT, HTTP_PORT, KV_PORT
from tests.chart.helm_chart import CHART
from tests.operator.pdcluster_api.manifests.rendering import shared_of

ROOT = Path(__file__).parents[2]
TRUST = (ROOT / "docs" / "trust.md").read_text()


def ports() -> dict[int, list[str]]:
    """Ports of the page, each with its cells after the first."""
    rows = re.findall(r"^\| (\d+), [^|]*\|(.*)\|$", TRUST, flags=re.MULTILINE)
    return {int(port): [cell.strip() for cell in cells.split("|")] for port, cells in rows}


def policies() -> dict[str, Manifest]:
    return {
        name: manifest["spec"]
        for (kind, name), manifest in shared_of().items()
        if kind == "NetworkPolicy"
    }


def test_every_port_is_in_the_table_and_grpc_alone_is_encrypted() -> None:
    assert set(ports()) == {HTTP_PORT, GRPC_PORT, KV_PORT, ETCD_CLIENT_PORT, ETCD_PEER_PORT}
    assert {port for port, cells in ports().items() if cells[1] != "no"} == {GRPC_PORT}


def test_ports_with_a_network_policy_as_fence_are_those_that_a_policy_closes() -> None:
    rules = [rule for spec in policies().values() for rule in spec["ingress"]]
    closed = {port["port"] for rule in rules if rule.get("from") for port in rule["ports"]}

    assert {port for port, cells in ports().items() if cells[3] == "NetworkPolicy"} == closed
    assert {tuple(spec["policyTypes"]) for spec in policies().values()} == {("Ingress",)}


def test_editors_of_a_namespace_may_write_pdclusters_unless_a_value_of_the_chart_forbids_it() -> (
    None
):
    assert yaml.safe_load((CHART / "values.yaml").read_text())["rbac"]["aggregate"] is True
    assert "`rbac.aggregate: false`" in TRUST
