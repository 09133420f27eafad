"""The kinds of values that fields hold: numbers with bounds, names, pod and chat templates.

Each refuses with a reason and a fix; units are the field's own.
"""

import re
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from pdcluster_schema.ports import MAX_WORKER_RANKS
from pdcluster_schema.section import Cel, Crd, check_size, quoted, rule, spelled
from pdcluster_schema.text import shortened

MAX_REPLICAS = 1024
"""Workers of one pool: eight times those of a whole cell."""

MAX_WORKERS = 4096
"""Workers of all pools of one object together."""

MAX_COUNT = (1 << 31) - 1
"""Tokens, requests, blocks and bytes of one: far above what there can be, and a sum of many stays
an exact number.
"""

MAX_ACCELERATORS_IN_USE = 8 * MAX_WORKERS
"""Accelerators of all workers of one object."""

MAX_SECONDS = 604_800
"""A week: what takes longer is a mistake, and is not waited for."""

MAX_WEIGHT = 1_000_000
"""Greatest weight, rate, price or ratio."""

Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Natural = Annotated[int, Field(ge=0, le=MAX_COUNT)]
HardwareNumber = Annotated[int, Field(ge=10**9, le=10**18)]  # in GB or TFLOPS it would be less
WholeSeconds = Annotated[int, Field(ge=1, le=MAX_SECONDS)]
AcceleratorCount = Annotated[int, Field(ge=1, le=MAX_ACCELERATORS_IN_USE)]
Ranks = Annotated[int, Field(ge=1, le=MAX_WORKER_RANKS), Crd(format="int32")]
Replicas = Annotated[int, Field(ge=0, le=MAX_REPLICAS), Crd(format="int32")]
Port = Annotated[int, Field(ge=1, le=65535)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0, le=MAX_SECONDS)]
Milliseconds = Annotated[float, Field(gt=0.0, le=1000 * MAX_SECONDS)]
Weight = Annotated[float, Field(ge=0.0, le=MAX_WEIGHT)]
Above0 = Annotated[float, Field(gt=0.0, le=MAX_WEIGHT)]
_NO_REVISION = re.compile(r"[-/.]|.*(\.\.|[\s~^:?*\[\\])", re.DOTALL)
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def dns_label(value: str) -> str:
    """Accept a DNS-1123 label that starts with a letter (Services need that); raises a rule error
    otherwise.
    """
    if _LABEL.fullmatch(value) is None:
        raise rule(
            f"{value!r} is not a name that Kubernetes takes",
            "use at most 63 lower-case letters, digits and '-', starting with a letter and ending "
            "with a letter or digit",
        )
    return value


def is_label(value: str, path: str) -> Cel:
    """A name is a DNS-1123 label that starts with a letter."""
    return Cel(
        f"{value}.matches('^[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?$')",
        "use at most 63 lower-case letters, digits and '-', starting with a letter and ending "
        "with a letter or digit",
        path,
    )


def _revision(value: str) -> str:
    """Accept what git can name a commit by."""
    if not value.isprintable() or _NO_REVISION.match(value):
        raise rule(
            f"{value!r} is not a branch, tag or commit",
            "write one without spaces, '..' and any of ~^:?*[\\, and not beginning with '-', '/' "
            "or '.'",
        )
    return value


Name = Annotated[str, Crd(minLength=1, maxLength=63), AfterValidator(dns_label)]
Text = Annotated[str, Field(min_length=1)]
HubRevision = Annotated[Text, AfterValidator(_revision)]
ObjectName = Annotated[
    str,
    Field(max_length=253),
    spelled(
        "[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*",
        "a name that Kubernetes takes",
        "use lower-case letters, digits, '-' and '.', starting and ending with a letter or digit",
    ),
]
"""Name of an object of the user's, such as a Secret; freer than the names that Services and pods
are made of.
"""

VariableName = Annotated[
    str,
    Field(max_length=256),
    spelled(
        r"[A-Za-z_][A-Za-z0-9_]*",
        "a name of an environment variable",
        "use letters, digits and '_', not starting with a digit",
    ),
]

_LINK_LOCAL = r"^(169[.]254[.]|\[[fF][eE][89abAB])"


def _no_cloud_service(endpoint: str) -> str:
    """Refuse addresses of one link: clouds have services for their machines there."""
    if re.match(_LINK_LOCAL, endpoint):
        raise rule(
            f"{endpoint!r} is link-local, and no etcd is there",
            "give the address of an etcd that workers on every node reach",
        )
    return endpoint


_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
Endpoint = Annotated[
    str,
    Field(max_length=260),
    spelled(
        rf"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):{_PORT}",
        "host:port",
        "write it like etcd.example:2379 or [fd00::1]:2379, with a port of 1 to 65535",
    ),
    AfterValidator(_no_cloud_service),
    Crd(
        Cel(
            f"!self.matches({quoted(_LINK_LOCAL)})",
            "link-local, and no etcd is there: give the address of an etcd that workers on every "
            "node reach",
        )
    ),
]


MAX_TEMPLATE_BYTES = 32 * 1024
"""Bytes of a pod template as JSON.  Each pool's StatefulSet and snapshot hold a copy, and most of
what is in etcd of a PDCluster is that.
"""

MAX_LEVELS = 100
"""Maps and lists within each other in a pod template; a pod needs a dozen."""


def _template(value: dict[str, Any]) -> dict[str, Any]:
    check_size(
        value,
        MAX_TEMPLATE_BYTES,
        "take out what it can do without, or put it into a ConfigMap that it mounts",
    )
    unknown = sorted(set(value) - {"metadata", "spec"})
    if unknown:
        raise rule(
            f"{unknown[0]!r} is no part of a pod template", "use metadata and spec", at=unknown[0]
        )
    for name, part in value.items():
        if not isinstance(part, dict):
            raise rule(
                f"must be a section of fields, not {part!r}",
                "write `field: value` lines below it",
                at=name,
            )
        _check_plain(part, name, MAX_LEVELS)
    for field, container, place in _MISPLACED:
        given = value.get("spec", {}).get(field)
        for index, each in enumerate(given if isinstance(given, list) else ()):
            if isinstance(each, dict) and each.get("name") == container:
                reason = f"{container} is none of the {field} of a worker's pod"
                raise rule(reason, f"put it into {place}", at=f"spec.{field}[{index}]")
    return value


_MISPLACED = (
    ("containers", "engine", "initContainers"),  # it starts before what asks it, and stays
    ("initContainers", "worker", "containers"),
)
"""Wrong list, name and right list of a container of the pod, which would be made twice."""


def _check_plain(value: object, path: str, levels: int) -> None:
    """Refuse what YAML can say and JSON cannot, dates and keys that are not text, and more levels
    than so many.
    """
    if not levels:
        raise rule(
            f"has more than {MAX_LEVELS} levels of maps and lists",
            "no field of a pod is that deep: remove it",
            at=".".join(path.split(".")[:3]),
        )
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise rule(f"the key {key!r} is not text", "put it in quotes", at=path)
            _check_plain(item, f"{path}.{key}", levels - 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(item, f"{path}[{index}]", levels - 1)
    elif not isinstance(value, str | int | float | None):
        raise rule(f"must be text, not {value!r}", "put it in quotes", at=path)


_FREE = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}

PodTemplate = Annotated[
    dict[str, Any],
    AfterValidator(_template),
    Crd(
        properties={
            "metadata": _FREE | {"description": "Labels and annotations."},
            "spec": _FREE | {"description": "Spec of a Pod."},
        }
    ),
]
"""Metadata and spec of a pod, merged strategically over what the operator renders: lists of named
things by their names.
"""

MAX_SPEC_BYTES = 128 * 1024
"""Bytes of a spec as JSON: of all that is rendered for each pool, templates and texts together."""
SHORTEN_SPEC = "shorten the longest of its templates and texts"


def _sized(value: object) -> object:
    check_size(value, MAX_SPEC_BYTES, SHORTEN_SPEC)
    return value


SizeOfSpec = BeforeValidator(_sized)
"""Before anything is made of it: of what is longer no field is looked at."""

TEMPLATES = ("chatml-tools",)
"""Names of chat templates that come with the worker."""

MAX_TEMPLATE = 65_536
"""Characters of a chat template."""


def _chat_template(text: str) -> str:
    """Refuse what would be every prompt: a misspelt name, or text without the messages."""
    if text in TEMPLATES or ("messages" in text and ("{{" in text or "{%" in text)):
        return text
    close = get_close_matches(text, TEMPLATES, n=1)
    raise rule(
        f"{shortened(text, 60)!r} is neither {' or '.join(TEMPLATES)} nor Jinja text that names "
        "messages",
        f"did you mean {close[0]}?" if close else "write the model's template, or leave it out",
    )


ChatTemplate = Annotated[
    Text,
    Field(max_length=MAX_TEMPLATE),
    AfterValidator(_chat_template),
    Crd(
        Cel(
            "self == 'chatml-tools' || self.contains('messages') && "
            "(self.contains('{{') || self.contains('{%'))",
            "neither a template that comes with the worker (chatml-tools) nor Jinja text that "
            "names messages: without them every prompt would be the same",
        )
    ),
]
"""Jinja text, or the name of a template that comes with the worker."""
