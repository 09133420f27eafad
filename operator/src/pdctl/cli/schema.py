"""`pdctl schema`: the form of a PDCluster file, for editors."""

import json
from typing import Any

import typer

from pdcluster_schema.crd.definitions import pdcluster_crd
from pdcluster_schema.pdcluster import KIND

_OPEN = ("additionalProperties", "x-kubernetes-preserve-unknown-fields")


def schema_command() -> None:
    """Print the JSON schema of a PDCluster file, which editors complete and check it by.

    For the YAML language server: `pdctl schema > pdcluster.schema.json`, and as the file's first
    line `# yaml-language-server: $schema=pdcluster.schema.json`. `pdctl validate` checks more.
    """
    typer.echo(json.dumps(file_schema(), indent=2, ensure_ascii=False))


def file_schema() -> dict[str, Any]:
    """The CRD's, without its status and with unknown fields refused."""
    (version,) = pdcluster_crd()["spec"]["versions"]
    schema = _closed(version["schema"]["openAPIV3Schema"])
    fields = schema["properties"]
    del fields["status"]
    fields["kind"]["enum"] = [KIND]
    fields["metadata"]["additionalProperties"] = True  # Kubernetes' own fields
    return {
        "$schema": "http://json-schema.org/draft-04/schema#",  # as OpenAPI has exclusiveMinimum
        **schema,
        "required": ["apiVersion", "kind", "metadata", "spec"],
    }


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _closed(value) for name, value in schema.items()}
    is_object = isinstance(found.get("properties"), dict) and found.get("type") == "object"
    if is_object and not any(name in found for name in _OPEN):
        found["additionalProperties"] = False
    return {name: value for name, value in found.items() if not _is_of_kubernetes(name)}


def _is_of_kubernetes(name: str) -> bool:
    return name.startswith("x-kubernetes-")
