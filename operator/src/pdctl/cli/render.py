"""`pdctl render`: what the operator would make of a PDCluster, without a cluster."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml

from pdcluster_api.apiserver.kinds import CHILDREN, CONTROLLER_REVISION
from pdcluster_api.apiserver.observe import Live
from pdcluster_api.manifests.objects import Manifest, Owner, RenderSettings
from pdcluster_api.manifests.render import render_tls_secrets
from pdcluster_api.plan.cluster import desired_state, plan_cluster
from pdcluster_api.plan.observed.state import Observed, PodState
from pdcluster_api.rendering import Records, Rendering
from pdcluster_schema.load import load_applied
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdctl.cli.options import Files, load_files, named_namespace
from pdctl.preview.preview import steady_state

# As an operator that is installed by the chart with its own values
CHART = RenderSettings(
    "pdcluster-worker:0.1.0",
    "quay.io/coreos/etcd:v3.6.6",
    "pdcluster-system",
    server_image="pdcluster-server:0.1.0",
)
UID = "00000000-0000-0000-0000-000000000000"  # in place of the PDCluster's, given by a cluster
_NUMBERS = tuple("0123456789+-.")  # how a text may begin that could be read as a number
_BOOLEANS = ("y", "Y", "n", "N")
_PLACES = {kind.kind: place for place, kind in enumerate(CHILDREN)}
_HEAD = """\
# PDCluster {namespace}/{name}, revision {revision}: as its operator makes it, all workers ready.
# Left out: ownerReferences, and the ControllerRevisions (--kind ControllerRevision), copies of the
# StatefulSets. Placeholders: keys and certificates in Secrets are empty; the UID is zeros.
"""


def rendered(cluster: PDCluster, site: RenderSettings, now: str) -> list[Manifest]:
    """Objects of a PDCluster that is as declared, in the order of making.  No key is drawn: Secrets
    hold empty values.  An etcd's tlsSecret is taken for one with a client certificate.
    """
    metadata = {**cluster.metadata.model_dump(), "uid": UID}
    owner = Owner(cluster.metadata.name, cluster.metadata.namespace, UID)
    image = site.worker_image_for(cluster.spec.engine.type)
    records = Records(cluster, Live({"metadata": metadata}, []), owner, image, True)
    plan = plan_cluster(desired_state(cluster, _all_ready(cluster), now))
    pair = {"tls.crt": b"", "tls.key": b""}
    secrets = render_tls_secrets(owner, pair, {"ca.crt": b"", **pair})
    made = [*secrets, *Rendering(records, site).manifests(plan)]
    return sorted(map(_without_owner, made), key=lambda each: _PLACES[each["kind"]])


def _all_ready(cluster: PDCluster) -> Observed:
    """Without scalers, so that they are made with their replicas."""
    steady = steady_state(cluster)
    workloads = [
        replace(
            state,
            pods=tuple(
                PodState(f"{state.id.name}-{each}", state.id, ready=True, terminating=False)
                for each in range(state.desired)
            ),
        )
        for state in steady.workloads
    ]
    return replace(steady, workloads=workloads, scalers=())


def _without_owner(manifest: Manifest) -> Manifest:
    """An owner that no cluster knows would have the object collected as garbage."""
    kept = {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}
    return {**manifest, "metadata": kept}


class _BlockDumper(yaml.SafeDumper):
    """Files are blocks of lines, and nothing is an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """kubectl takes more texts for numbers and booleans than PyYAML does: 84664e07, y."""
    is_quoted = text[:1] in _NUMBERS or text in _BOOLEANS
    style = "|" if "\n" in text else "'" if is_quoted else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _text)


def _documents(manifests: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for manifest in manifests:
        yield "---\n" + yaml.dump(manifest, Dumper=_BlockDumper, sort_keys=False, width=1000)


def _known(kinds: list[str]) -> list[str]:
    if unknown := sorted({*kinds} - _PLACES.keys()):
        raise typer.BadParameter(f"no {unknown[0]} is ever made; give one of {', '.join(_PLACES)}")
    return kinds


def render_command(
    files: Files,
    *,
    output: Annotated[
        Literal["yaml", "json"],
        typer.Option("--output", "-o", help="yaml has a document for each object, json one List"),
    ] = "yaml",
    kind: Annotated[
        list[str],
        typer.Option(
            metavar="KIND",
            callback=_known,
            help="these kinds alone, as in StatefulSet; may be given again",
        ),
    ] = [],  # noqa: B006 - typer reads it, and nothing changes it
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", metavar="NAMESPACE", help="of files that name none; else default"
        ),
    ] = None,
    worker_image: Annotated[
        str, typer.Option(metavar="IMAGE", help="of a PDCluster that names none")
    ] = CHART.worker_image,
    server_image: Annotated[
        str, typer.Option(metavar="IMAGE", help="of one with a stock engine that names none")
    ] = CHART.server_image,
    etcd_image: Annotated[
        str, typer.Option(metavar="IMAGE", help="of a managed etcd that names none")
    ] = CHART.etcd_image,
    operator_namespace: Annotated[
        str,
        typer.Option(metavar="NAMESPACE", help="from where NetworkPolicies let the operator in"),
    ] = CHART.operator_namespace,
) -> None:
    """Print every object that the operator would make of PDClusters, without a cluster: pods as
    StatefulSets and Deployments, Services, and ConfigMaps with the workers' files. No key or
    certificate is printed.
    """
    site = RenderSettings(worker_image, etcd_image, operator_namespace, server_image=server_image)
    clusters = [
        cluster for _, cluster in load_files(files, lambda file: _in_namespace(file, namespace))
    ]
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    items: list[Manifest] = []
    for cluster in clusters:
        shown = [each for each in rendered(cluster, site, now) if _is_shown(each, kind)]
        items.extend(shown)
        if output == "yaml":
            head = _HEAD.format(
                namespace=cluster.metadata.namespace,
                name=cluster.metadata.name,
                revision=revision_of(cluster.spec),
            )
            typer.echo(head + "".join(_documents(shown)), nl=False)
    if output == "json":
        typer.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2))


def _is_shown(manifest: Manifest, kinds: list[str]) -> bool:
    found = manifest["kind"]
    return found in kinds if kinds else found != CONTROLLER_REVISION.name


def _in_namespace(file: Path, namespace: str | None) -> PDCluster:
    cluster = load_applied(file)
    found = named_namespace(cluster, namespace) or cluster.metadata.namespace
    metadata = cluster.metadata.model_copy(update={"namespace": found})
    return cluster.model_copy(update={"metadata": metadata})
