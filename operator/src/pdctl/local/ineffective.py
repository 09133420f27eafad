"""Sections of a PDCluster without an effect on one machine: `pdctl up` names and accepts them.

Sections that would give a wrong result here are refused by `local.plan` instead.
"""

from collections.abc import Iterator
from typing import Any

from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.sections import ENGINELESS, ROLES

_NO_PODS = "there are no pods here"
_ETCD = "an etcd that is run here is one process, whose data is lost with the run"
_OWN_START = "a worker without a stock engine may take any time to start"
_PROGRAM = "a stock engine is a program of this machine"
_MODEL = {
    "model.pvc": "there are no volumes here",
    "model.huggingFace.tokenSecret": "there are no Secrets here: the token is that of HF_TOKEN",
    "model.nodeCache": "downloads go to ~/.cache/pdcluster here",
}
_OF_ROLES = {
    "resources": "a process may take what the machine has",
    "resourceClaims": _NO_PODS,
    "sharedMemory": _NO_PODS,
    "podTemplate": _NO_PODS,
}
_INEFFECTIVE = {
    "image": "workers are processes of this installation",
    "engine.image": _PROGRAM,
    "roles.prefill.engine.image": _PROGRAM,
    "roles.decode.engine.image": _PROGRAM,
    "roles.mixed.engine.image": _PROGRAM,
    **{f"roles.{role}.{field}": reason for field, reason in _OF_ROLES.items() for role in ROLES},
    "accelerators": "no node is chosen here",
    "discovery.etcd.replicas": _ETCD,
    "discovery.etcd.image": _ETCD,
    "discovery.etcd.storage": _ETCD,
    "service.type": "there is no Service here: the API is at --host",
    "service.annotations": "there is no Service here: the API is at --host",
    "service.endpointPicker": "there is no gateway here: the API is at --host",
    "service.apiKeySecret": "there are no Secrets here: the key is that of --api-key",
    "placement.domainLabel": "all workers are on this machine",
    "placement.mode": "all workers are on this machine",
    "rollout": "there is one revision, and workers have a minute to finish their streams",
    "networkPolicy": "workers listen on 127.0.0.1, and the API at --host",
    "podTemplate": _NO_PODS,
}
"""Idle sections by path below spec, with the reason."""


def ineffective_remarks(cluster: PDCluster) -> list[str]:
    """A line for each reason, with the sections that have no effect here."""
    given = cluster.spec.model_dump(by_alias=True, exclude_defaults=True)
    if cluster.spec.service.has_own_picker:
        del given["service"]["endpointPicker"]  # it runs here too
    paths: dict[str, list[str]] = {}
    for path, reason in {**_MODEL, **_INEFFECTIVE}.items():
        if _at(given, path) is not None:
            paths.setdefault(reason, []).append(f"spec.{path}")
    lines = [f"{_listed(found)} no effect here: {reason}" for reason, found in paths.items()]
    timed = [
        f"spec.roles.{role}.startupTimeoutSeconds"
        for role, spec in cluster.spec.roles.present().items()
        if spec.startup_timeout_seconds is not None
        and (role in ENGINELESS or not cluster.spec.engine_of(role).is_stock)
    ]
    if timed:
        lines.append(f"{_listed(timed)} no effect here: {_OWN_START}")
    return [*lines, *_scaling_remarks(cluster)]


def without_ineffective(spec: dict[str, Any]) -> dict[str, Any]:
    """A spec without the fields that may be edited during a run.

    The model stays: all of it decides where its folder is looked for.
    """
    return dict(_kept(spec, ""))


def _kept(section: dict[str, Any], below: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        path = f"{below}{key}"
        if path not in _INEFFECTIVE and path not in ("autoscale", "placement"):
            yield key, dict(_kept(value, f"{path}.")) if isinstance(value, dict) else value


def _scaling_remarks(cluster: PDCluster) -> list[str]:
    mode = cluster.spec.autoscale.mode
    if mode == "Off":
        return []
    instead = "every pool runs its `replicas`; `pdctl autoscale replay` tries it on a trace"
    return [f"autoscale.mode is {mode}, and pdctl up does not scale: {instead}"]


def _at(section: Any, path: str) -> Any:
    """None = not given."""
    for key in path.split("."):
        section = section.get(key) if isinstance(section, dict) else None
    return section


def _listed(paths: list[str]) -> str:
    return f"{', '.join(paths)} {'has' if len(paths) == 1 else 'have'}"
