"""A YAML file to a checked section; what is wrong with it is a ConfigError with the file, the
field's path and the reason.
"""

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from pdcluster_worker.config.section import Section
from pdcluster_worker.errors import ConfigError

SectionT = TypeVar("SectionT", bound=Section)


def document_of(path: Path) -> Any:
    """Read a YAML file; an empty one is an empty mapping.  Raises ConfigError."""
    try:
        content = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    try:
        return yaml.safe_load(content) or {}
    # not only YAMLError: ValueError of a date that is none, RecursionError, KeyError of a tagged
    # value
    except Exception as e:
        raise ConfigError(f"{path}: not YAML: {e}") from e


def converted(path: Path, document: Any, kind: type[SectionT]) -> SectionT:
    """Check a document against its section.  Raises ConfigError."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{path}: {e}") from e
