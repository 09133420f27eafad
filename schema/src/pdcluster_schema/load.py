"""Read a PDCluster from YAML: every fault at once, each with path, reason and fix.

A file may hold other objects beside one PDCluster.  An object as the API
server returns it is accepted too: what the server owns is left out.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pdcluster_schema.faults import Fault, InvalidObjectError, Location, unknown_fields, validated
from pdcluster_schema.pdcluster import KIND, PDCluster, PDClusterSpec
from pdcluster_schema.section import json_size, too_long
from pdcluster_schema.stock_engine import STOCK_IMAGES
from pdcluster_schema.values import MAX_SPEC_BYTES, SHORTEN_SPEC

_SPEC_BYTES = "specBytes"
"""Field in place of a spec that is too long."""

_SERVER_METADATA = frozenset(
    {
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "generation",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    }
)


def load(path: Path) -> PDCluster:
    """Read the one PDCluster of a YAML file; `-` is stdin.  Raises InvalidObjectError with every
    fault.
    """
    return _read(path, parse)


def load_all(path: Path) -> list[PDCluster]:
    """Read each PDCluster of a YAML file, one at least, as `load` the only one.  Raises
    InvalidObjectError with the faults of all.
    """
    clusters, faults = list[PDCluster](), list[Fault]()
    for node, document in _clusters(_text(path)):
        try:
            clusters.append(_parsed(node, document, parse))
        except InvalidObjectError as e:
            faults += e.faults
    if faults:
        raise InvalidObjectError(faults)
    return clusters


def load_applied(path: Path) -> PDCluster:
    """As `load`, for a file that Kubernetes is to run; see `parse_applied`."""
    return _read(path, parse_applied)


def _read(path: Path, parse: Callable[[dict[str, Any]], PDCluster]) -> PDCluster:
    clusters = _clusters(_text(path))
    if len(clusters) > 1:
        lines = ", ".join(str(node.start_mark.line + 1) for node, _ in clusters)
        reason = f"holds {len(clusters)} objects of kind {KIND}, which begin in lines {lines}"
        raise InvalidObjectError([Fault("", reason, "write each in a file of its own")])
    return _parsed(*clusters[0], parse)


def _parsed(
    node: yaml.Node, document: dict[str, Any], parse: Callable[[dict[str, Any]], PDCluster]
) -> PDCluster:
    """Faults get the lines of their fields."""
    try:
        return parse(document)
    except InvalidObjectError as e:
        faults = [replace(fault, line=line_of(node, fault.path)) for fault in e.faults]
        raise InvalidObjectError(faults) from e


def _text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        reason = (e.strerror or str(e)) if isinstance(e, OSError) else "it is not UTF-8 text"
        raise InvalidObjectError(
            [Fault("", f"cannot be read: {reason}", "give the path of a PDCluster YAML file")]
        ) from e


def parse(document: dict[str, Any]) -> PDCluster:
    """Validate one object.  Raises InvalidObjectError with every fault."""
    return validated(PDCluster, _without_server_fields(document))


def parse_applied(document: dict[str, Any]) -> PDCluster:
    """Validate an object that Kubernetes is to run, where fewer model paths mean something.

    Raises InvalidObjectError with every fault.
    """
    cluster = parse(document)
    if (fault := applied_fault(cluster)) is not None:
        raise InvalidObjectError([fault])
    return cluster


def applied_fault(cluster: PDCluster) -> Fault | None:
    """First fault that Kubernetes finds in an object that `pdctl up` runs."""
    for field, path, fix in _paths(cluster.spec):
        if cluster.spec.model.pvc is None and not path.startswith("/"):
            reason = (
                f"must begin with /, not {path!r}: ~ and relative paths without pvc are for pdctl "
                "alone"
            )
            return Fault(field, reason, fix)
    for role in cluster.spec.roles.computing():
        engine = cluster.spec.engine_of(role)
        if engine.is_stock and engine.image is None:
            reason = f"is missing, and engine.type: {engine.type} needs it on Kubernetes"
            fix = f"give a stock image, like {STOCK_IMAGES[engine.type]}"
            return Fault("spec.engine.image", reason, fix)
    return None


def _paths(spec: PDClusterSpec) -> Iterator[tuple[str, str, str]]:
    """Field, path and fix of each folder of a model that the object names."""
    if spec.model.path is not None:
        fix = (
            "write the folder in the image like /models/llm, or give pvc and the folder's path on "
            "it"
        )
        yield "spec.model.path", spec.model.path, fix
    for index, adapter in enumerate(spec.model.adapters):
        if adapter.path is None:
            continue
        fix = "write the folder as the engine's container sees it"
        yield f"spec.model.adapters[{index}].path", adapter.path, fix
    if spec.model.runtime_adapters is not None:
        fix = "write the folder as the engine's container sees it"
        yield "spec.model.runtimeAdapters.path", spec.model.runtime_adapters.path, fix
    for role in spec.roles.computing():
        drafts = spec.engine_of(role).speculation
        if drafts is not None and drafts.draft_model is not None:
            fix = "write the folder in the image, or give model.pvc and the folder's path on it"
            yield f"spec.roles.{role}.engine.speculation.draftModel", drafts.draft_model, fix


def bounded(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """An object as the API server stores it, to be kept: of a spec that is too long no more than
    its size, for which `parse_stored` refuses it as it would the whole.
    """
    num_bytes = json_size(document.get("spec"))
    if num_bytes <= MAX_SPEC_BYTES:
        return document
    rest = {key: value for key, value in document.items() if key != "spec"}
    return {**rest, _SPEC_BYTES: num_bytes}


def parse_stored(document: Mapping[str, Any]) -> tuple[PDCluster, list[str]]:
    """Validate an object as the API server stores it; returns also the paths of the fields passed
    over.

    The API server has judged each field by its CRD, which may be older or newer than this
    operator: it fills in defaults of fields that are unknown here.  They make no object invalid.
    Raises InvalidObjectError with every other fault.
    """
    stored = dict(document)
    if _SPEC_BYTES in stored:
        reason = too_long(stored[_SPEC_BYTES], MAX_SPEC_BYTES)
        raise InvalidObjectError([Fault("spec", reason, SHORTEN_SPEC)])
    try:
        return parse_applied(stored), []
    except InvalidObjectError:
        unknown = unknown_fields(PDCluster, _without_server_fields(stored))
        if not unknown:
            raise
    cluster = parse_applied(_without(stored, unknown))
    return cluster, [".".join(map(str, location)) for location in unknown]


def _without(value: Any, locations: Iterable[Location]) -> Any:
    """A copy of nested maps and lists without what is at the locations."""
    below: defaultdict[int | str, list[Location]] = defaultdict(list)
    for first, *rest in locations:
        below[first].append(tuple(rest))
    if isinstance(value, Mapping):
        return {
            key: _without(item, below[key]) for key, item in value.items() if () not in below[key]
        }
    if isinstance(value, list):
        return [_without(item, below[index]) for index, item in enumerate(value)]
    return value


def _clusters(text: str) -> list[tuple[yaml.Node, dict[str, Any]]]:
    """The PDClusters of a file, one at least."""
    try:
        documents = [(node, found) for node, found in _documents(text) if found is not None]
    # not only YAMLError: ValueError of a date that is none, RecursionError, KeyError of a tagged
    # value
    except Exception as e:
        raise InvalidObjectError([_yaml_fault(e)]) from e
    clusters = [
        (node, found)
        for node, found in documents
        if isinstance(found, dict) and found.get("kind") == KIND
    ]
    if not clusters:
        kinds = [
            str(found.get("kind")) if isinstance(found, dict) else "no object"
            for _, found in documents
        ]
        reason = f"must hold one object of kind {KIND}, not {', '.join(kinds) or 'nothing'}"
        raise InvalidObjectError([Fault("", reason, f"write one with `kind: {KIND}`")])
    return clusters


def _documents(text: str) -> Iterator[tuple[yaml.Node, Any]]:
    loader = _UniqueKeyLoader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "checked"
            yield node, loader.construct_document(node)
    finally:
        loader.dispose()


def line_of(node: yaml.Node, path: str) -> int:
    """Line, from 1, of a field, or of the innermost section of its path that is written.

    >>> line_of(yaml.compose("a:\\n  b.c/d: [1,\\n    2]"), "a.b.c/d[1]")
    3
    """
    line = node.start_mark.line + 1
    while path:
        step = _step(node, path)
        if step is None:
            return line
        line, node, path = step
    return line


def _step(node: yaml.Node, path: str) -> tuple[int, yaml.Node, str] | None:
    """Line and node of the first part of a path, and the rest of it; keys may have dots."""
    if isinstance(node, yaml.SequenceNode):
        index, _, rest = path.removeprefix("[").partition("]")
        item = node.value[int(index)] if index.isdigit() and int(index) < len(node.value) else None
        return item and (item.start_mark.line + 1, item, rest.removeprefix("."))
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        rest = path.removeprefix(key.value)
        if rest != path and rest[:1] in ("", ".", "["):
            return key.start_mark.line + 1, value, rest.removeprefix(".")
    return None


def _yaml_fault(error: Exception) -> Fault:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return Fault(
            "",
            f"not YAML: {error}",
            "look for a date, a number, a tag or a nesting that cannot be read",
        )
    problem = getattr(error, "problem", None) or error
    return Fault("", f"not YAML: {problem}", "correct that line", line=mark.line + 1)


def _without_server_fields(document: dict[str, Any]) -> dict[str, Any]:
    cleaned = {key: value for key, value in document.items() if key != "status"}
    if isinstance(cleaned.get("metadata"), dict):
        cleaned["metadata"] = {
            key: value for key, value in cleaned["metadata"].items() if key not in _SERVER_METADATA
        }
    return cleaned


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML would silently keep the last, and names
    the line of a value that cannot be read.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError) as e:
            raise yaml.constructor.ConstructorError(None, None, str(e), node.start_mark) from e

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)
