"""A broken rule, in the form that `schema.load` turns into a Fault."""

import re
from dataclasses import dataclass

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from pdcluster_schema.crd.keywords import Crd, matches
from pdcluster_schema.quick_json import encoded


def rule(reason: str, fix: str, *, at: str = "") -> PydanticCustomError:
    """An error to raise in a validator.  at: path below the model that raises it, as in `replicas`
    or `pools[1].name`.
    """
    return PydanticCustomError("rule", "{reason}", {"reason": reason, "fix": fix, "at": at})


@dataclass(frozen=True)
class Spelled(AfterValidator):
    """A validator of text, and the same for the API server."""

    crd: Crd


def spelled(pattern: str, what: str, fix: str) -> Spelled:
    """A validator of text that must match the whole pattern, of Python's syntax and RE2's.

    what: completes `'...' is not ...`
    """
    compiled = re.compile(pattern, re.ASCII)

    def check(value: str) -> str:
        if compiled.fullmatch(value) is None:
            raise rule(f"{value!r} is not {what}", fix)
        return value

    return Spelled(check, matches(pattern, what, fix))


def check_size(value: object, most: int, fix: str) -> None:
    """Refuse a part of an object that has more bytes than `most` as JSON."""
    num_bytes = json_size(value)
    if num_bytes > most:
        raise rule(too_long(num_bytes, most), fix)


def json_size(value: object) -> int:
    """Bytes as JSON; 0 of what JSON cannot say, which is refused where it stands."""
    try:
        return len(encoded(value))
    except ValueError:
        return 0


def too_long(num_bytes: int, most: int) -> str:
    """Reason of a refused size."""
    return f"has {num_bytes} bytes as JSON, and may have {most} at most"
