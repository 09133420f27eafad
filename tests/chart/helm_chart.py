"""The chart as Helm renders it, for tests: values in, parsed objects out."""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "pdcluster"
HELM = ROOT / ".venv" / "bin" / "helm"
RELEASE, NAMESPACE = "pdc", "pdcluster-system"

Manifest = dict[str, Any]


class HelmError(Exception):
    """Helm refused; its words."""


def helm(*arguments: str, values: Manifest | None = None) -> str:
    """Run helm and return what it says.

    A missing helm is an error, never a skip: `make setup` installs it.
    """
    command = [str(HELM), *arguments] + (["--values", "-"] if values is not None else [])
    done = subprocess.run(
        command,
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise HelmError(done.stderr)
    return done.stdout


def render(values: Manifest | None = None, *arguments: str) -> list[Manifest]:
    """Every object of the chart with these values over its own."""
    text = helm(
        "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *arguments, values=values or {}
    )
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """Those of one kind, in the order of Helm."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def only(manifests: list[Manifest], kind: str) -> Manifest:
    """The only one of a kind."""
    (found,) = of_kind(manifests, kind)
    return found


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one of a kind with this name."""
    (found,) = [
        manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"] == name
    ]
    return found


def pod_of(manifests: list[Manifest]) -> Manifest:
    """The pod that the Deployment makes."""
    pod: Manifest = only(manifests, "Deployment")["spec"]["template"]["spec"]
    return pod


def environment_of(manifests: list[Manifest]) -> dict[str, Any]:
    """The operator's environment: a value, or where the value comes from."""
    return {
        entry["name"]: entry.get("value", entry.get("valueFrom"))
        for entry in pod_of(manifests)["containers"][0]["env"]
    }
