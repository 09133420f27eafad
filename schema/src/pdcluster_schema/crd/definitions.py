"""Both CRDs as the API server takes them: names, columns of `kubectl get`, and schemas."""

from collections.abc import Sequence
from typing import Any

from pdcluster_schema.crd.openapi import Schema, SchemaMaker
from pdcluster_schema.labels import GROUP
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.section import Cel
from pdcluster_schema.spec_rules import object_rules
from pdcluster_schema.status import ClusterStatus, PoolScalerSpec, PoolScalerStatus

_READY = '.status.conditions[?(@.type=="Ready")]'
_DISAGGREGATING = '.status.conditions[?(@.type=="Disaggregating")].status'

Column = tuple[str, str, str]
"""Name, JSON path and description of a column."""

_COLUMNS: Sequence[Column] = (
    ("Model", ".spec.model.name", "Name by which clients call the model."),
    ("Prefill", ".status.prefill", "Prefill workers that are ready / that should be."),
    ("Decode", ".status.decode", "Decode (or mixed) workers that are ready / that should be."),
    ("Router", ".status.router", "Routers that are ready / that should be."),
    ("Ready", f"{_READY}.status", "True when all is as declared."),
    ("Reason", f"{_READY}.reason", "Reason of the condition Ready."),
)
_WIDE_COLUMNS: Sequence[Column] = (
    ("Disaggregating", _DISAGGREGATING, "True while prefill workers prefill long prompts."),
    ("Remote", ".status.disaggregation.remoteShare", "The share of them that is."),
    ("Autoscale", ".spec.autoscale.mode", "Mode of the autoscaler: On = it decides the sizes."),
    ("Endpoint", ".status.endpoint", "Address of the OpenAI API."),
    ("Revision", ".status.revision", "The revision that the spec asks for."),
)
_SCALER_COLUMNS: Sequence[Column] = (
    ("Cluster", ".spec.cluster", "The PDCluster."),
    ("Role", ".spec.role", "prefill, decode, mixed, router or picker."),
    ("Pool", ".spec.pool", "The pool of that role."),
)
_SCALER_SIZES: Sequence[Column] = (
    ("Desired", ".spec.replicas", "Workers that are asked for."),
    ("Current", ".status.replicas", "Workers that exist."),
)
_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}

_SCALER_RULE = Cel(
    "self.cluster == oldSelf.cluster && self.role == oldSelf.role && self.pool == oldSelf.pool",
    "cluster, role and pool cannot change: the operator makes a scaler for each pool",
)


def pdcluster_crd() -> Schema:
    """The CRD of PDCluster."""
    maker = SchemaMaker()
    # not seen yet: kstatus would take an object without a status for ready
    status = {**maker.section(ClusterStatus), "default": {"observedGeneration": -1}}
    name = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}}
    schema = {
        "type": "object",
        "description": "A cluster of prefill and decode (or mixed) workers that serves one large "
        "language model.",
        "required": ["spec"],
        "x-kubernetes-validations": [each.schema() for each in object_rules()],
        "properties": _properties(name, maker.section(PDClusterSpec), status),
    }
    columns = [
        *_columns(_COLUMNS, "string"),
        *(column | {"priority": 1} for column in _columns(_WIDE_COLUMNS, "string")),
        _AGE,
    ]
    return _crd("PDCluster", "pdc", schema, {"status": {}}, columns)


def pool_scaler_crd() -> Schema:
    """The CRD of PDPoolScaler."""
    maker = SchemaMaker()
    spec = {**maker.section(PoolScalerSpec), "x-kubernetes-validations": [_SCALER_RULE.schema()]}
    status = maker.section(PoolScalerStatus)
    schema = {
        "type": "object",
        "description": "The number of workers of one pool of a PDCluster, as a scale subresource.",
        "required": ["spec"],
        "properties": _properties({"type": "object"}, spec, status),
    }
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    columns = [
        *_columns(_SCALER_COLUMNS, "string"),
        *_columns(_SCALER_SIZES, "integer"),
        _AGE,
    ]
    return _crd("PDPoolScaler", "pdps", schema, {"status": {}, "scale": scale}, columns)


def _properties(metadata: Schema, spec: Schema, status: Schema) -> Schema:
    text = {"type": "string"}
    return {
        "apiVersion": text,
        "kind": text,
        "metadata": metadata,
        "spec": spec,
        "status": status,
    }


def _columns(columns: Sequence[Column], kind: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "type": kind, "jsonPath": path, "description": text}
        for name, path, text in columns
    ]


def _crd(
    kind: str, short: str, schema: Schema, subresources: Schema, columns: list[dict[str, Any]]
) -> Schema:
    plural, group = f"{kind.lower()}s", GROUP
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": "v1alpha1",
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }
