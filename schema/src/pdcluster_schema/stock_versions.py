"""Versions of stock engines: those that are known here, and the one that an image's tag names."""

import re
from typing import Final

from pdcluster_schema.stock_engine import SGLANG, STOCK

# versions that docs/engines.md has tests of, both inclusive: they take the same flags and requests
OLDEST, NEWEST = (0, 30), (0, 33)

SGLANG_VERSION = "0.5.23"  # likewise

_NAMED: Final = re.compile(r"(?:^|/)(vllm|sglang)(?:-[a-z-]+)?(?:[:@]|$)")
_PUBLISHED = re.compile(r"(^|/)(sglang|vllm-openai(-cpu|-rocm|-xpu)?):v?0\.")


def tagged_version(image: str | None) -> str:
    """Version of a stock engine by its image's tag; empty where that is not said.

    >>> tagged_version("registry:5000/vllm/vllm-openai:v0.32.0-cu129")
    '0.32.0'
    """
    found = re.search(r":v?(\d+\.\d+\.\d+[.a-z0-9]*)", image or "")
    return "" if found is None else found[1]


def unknown_version(version: str) -> str:
    """Return the fault of an unknown version; empty for a known one.

    >>> unknown_version("0.33.1+cpu")
    ''
    >>> unknown_version("0.29.0")
    'vLLM 0.29.0 is not known here: use 0.30 to 0.33'
    """
    parts = version.split(".")[:2]
    known = tuple(int(part) if part.isdigit() else -1 for part in parts)
    if OLDEST <= known <= NEWEST:
        return ""
    ends = " to ".join(".".join(map(str, end)) for end in (OLDEST, NEWEST))
    return f"vLLM {version or '?'} is not known here: use {ends}"


def unknown_sglang(version: str) -> str:
    if version == SGLANG_VERSION:
        return ""
    return f"SGLang {version or '?'} is not known here: use {SGLANG_VERSION}"


def image_fault(kind: str, image: str | None, allows_unknown: bool) -> tuple[str, str] | None:
    """(reason, fix) of an image that by its name or tag is not for a stock engine of this type.

    >>> image_fault("vllm", "lmsysorg/sglang:latest", True)
    ('is an image of SGLang, and engine.type is vllm', 'give an image of vLLM, or set type: sglang')
    """
    named = _NAMED.search(image or "")
    if named is not None and kind in STOCK and named[1] != kind:
        reason = f"is an image of {STOCK[named[1]]}, and engine.type is {kind}"
        return reason, f"give an image of {STOCK[kind]}, or set type: {named[1]}"
    version = published_version(image)
    fault = (unknown_sglang if kind == SGLANG else unknown_version)(version) if version else ""
    if not fault or allows_unknown:
        return None
    reason, _, fix = fault.partition(": ")
    return reason, f"{fix}, or set engine.allowUnknownVersion: true"


def published_version(image: str | None) -> str:
    """Version by the tag of an image of an engine's own name; others have tags of their own, and so
    do registries whose versions do not begin with 0.
    """
    return tagged_version(image) if _PUBLISHED.search(image or "") else ""
