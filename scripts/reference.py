"""Write docs/reference.md: every field of our objects, from the descriptions in the CRDs.

`reference.py` writes it; `reference.py --check` changes nothing, and exits 1 when the
file is not what the CRDs say.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PAGE = Path("docs/reference.md")
CRDS = ("pdcluster", "pdpoolscaler")
HEAD = """# Reference

Every field of a PDCluster and of its scalers.  Made by `make charts` from the CRDs, and these from
the types in `schema/`, where a change belongs.  A section that is like an earlier one is not
repeated.
"""

Schema = Mapping[str, Any]


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Write, or check with `--check`; returns the exit status."""
    text = page(root)
    if list(arguments) != ["--check"]:
        (root / PAGE).write_text(text)
        return 0
    is_same = (root / PAGE).is_file() and (root / PAGE).read_text() == text
    print(
        f"reference: {text.count('| `')} fields"
        + ("" if is_same else f"; {PAGE} is not what the CRDs say: run `make charts`")
    )
    return 0 if is_same else 1


def page(root: Path) -> str:
    """The whole page."""
    parts = [HEAD]
    for name in CRDS:
        crd = yaml.safe_load((root / "crds" / f"{name}.yaml").read_text())
        version = crd["spec"]["versions"][0]
        schema = version["schema"]["openAPIV3Schema"]
        kind, group = crd["spec"]["names"]["kind"], crd["spec"]["group"]
        parts.append(
            f"## {kind}\n\n{schema['description']} `apiVersion: "
            f"{group}/{version['name']}`.\n{_rules(schema)}"
        )
        fields = [
            (field, schema["properties"][field])
            for field in ("spec", "status")
            if field in schema["properties"]
        ]
        objects = [each for field, inner in fields for each in _objects(field, inner)]
        homes: dict[str, str] = {}
        for path, each in objects:
            homes.setdefault(repr(each["properties"]), path)
        parts += [
            section(path, each, homes)
            for path, each in objects
            if homes[repr(each["properties"])] == path
        ]
    return "\n".join(parts)


def section(path: str, schema: Schema, homes: Mapping[str, str]) -> str:
    """The section of one object.  homes: path of the object with a section, by its fields"""
    fields = schema["properties"].items()
    rows = [
        f"| `{name}` | {_type(each)} | {_limits(each)} | {_text(path, name, schema, homes)} |"
        for name, each in fields
    ]
    head = ["| field | type | default and limits | description |", "| --- | --- | --- | --- |"]
    return "\n".join(
        [f"### {path}\n\n{schema.get('description', '')}\n{_rules(schema)}", *head, *rows, ""]
    )


def _objects(path: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """An object with fields, and all in it, with their paths."""
    path, inner = _inner(path, schema)
    if inner.get("properties"):
        yield path, inner
        for name, each in inner["properties"].items():
            yield from _objects(f"{path}.{name}", each)


def _inner(path: str, schema: Schema) -> tuple[str, Schema]:
    """Path and schema of the object in a field: itself, an item, or a value by key."""
    if "items" in schema:
        return _inner(f"{path}[]", schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        return _inner(f"{path}.*", schema["additionalProperties"])
    return path, schema


def _type(schema: Schema) -> str:
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_type(schema['additionalProperties'])}"
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    return str(schema.get("type", "any"))


def _limits(schema: Schema) -> str:
    """Default, values and bounds, as far as the schema has them."""
    found = []
    if schema.get("default") is not None:
        found.append(f"default `{_value(schema['default'])}`")
    if "enum" in schema:
        found.append(
            "one of " + ", ".join(f"`{each}`" for each in schema["enum"] if each is not None)
        )
    low, high = schema.get("minimum"), schema.get("maximum")
    above = "above " if schema.get("exclusiveMinimum") else "at least "
    found += [] if low is None else [f"{above}{low}"]
    found += [] if high is None else [f"at most {high}"]
    for name, unit in (
        ("maxLength", "characters"),
        ("maxItems", "items"),
        ("maxProperties", "keys"),
    ):
        found += [f"at most {schema[name]} {unit}"] if name in schema else []
    return ", ".join(found)


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(path: str, name: str, owner: Schema, homes: Mapping[str, str]) -> str:
    """Description of a field in one line, and where the fields of an object are."""
    schema = owner["properties"][name]
    _, inner = _inner(path, schema)
    text = " ".join(
        str(schema.get("description") or inner.get("description") or "").split()
    ).replace("|", "\\|")
    required = " Required." if name in owner.get("required", ()) else ""
    where = homes[repr(inner["properties"])] if inner.get("properties") else None
    fields = "" if where is None else f" Fields: [{where}](#{_anchor(where)})."
    return f"{text}{required}{fields}".strip()


def _anchor(path: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return "".join(each for each in path.lower() if each.isalnum() or each in "-_ ").replace(
        " ", "-"
    )


def _rules(schema: Schema) -> str:
    """Rules over several fields, by their messages."""
    messages = dict.fromkeys(
        rule["message"] for rule in schema.get("x-kubernetes-validations", ()) if "message" in rule
    )
    return "\n" + "\n".join(f"- {message}." for message in messages) + "\n" if messages else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
