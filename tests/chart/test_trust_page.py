"""docs/trust.md says what is: the lines that code can hold, beside that code."""

import json
import re
from pathlib import Path

import pytest
import yaml

from pdcluster_api.manifests.objects import ETCD_CLIENT_PORT, ETCD_PEER_PORT, Manifest
from pdcluster_schema.ports import GRPC_PORT, HTTP_PORT, KV_PORT
from tests.chart.helm_chart import CHART
from tests.operator.pdcluster_api.manifests.rendering import shared_of
from tests.schema.object_cases import at

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


def test_etcd_that_is_run_has_neither_tls_nor_a_password() -> None:
    """Once this fails, the page can promise more."""
    (etcd,) = [
        manifest
        for (kind, _), manifest in shared_of().items()
        if kind == "Deployment" and "etcd" in json.dumps(manifest["spec"])
    ]
    command = etcd["spec"]["template"]["spec"]["containers"][0]["command"]
    flags = dict(part.removeprefix("--").split("=", 1) for part in command[1:])

    assert flags["listen-client-urls"].startswith("http://")
    assert not {flag for flag in flags if "auth" in flag or "cert" in flag or "ca-file" in flag}


def test_a_public_service_without_keys_is_not_refused() -> None:
    assert shared_of(at("spec.service.type", "LoadBalancer"))


def test_editors_of_a_namespace_may_write_pdclusters_unless_a_value_of_the_chart_forbids_it() -> (
    None
):
    assert yaml.safe_load((CHART / "values.yaml").read_text())["rbac"]["aggregate"] is True
    assert "`rbac.aggregate: false`" in TRUST


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md"])
def test_the_page_is_linked(page: str) -> None:
    assert "trust.md)" in (ROOT / page).read_text()


def test_every_link_of_the_page_leads_somewhere() -> None:
    links: list[str] = re.findall(r"\]\(([^)#:]+)[)#]", TRUST)

    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
