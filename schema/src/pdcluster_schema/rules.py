"""A broken rule, in the form that `schema.load` turns into a Fault."""

import re

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from pdcluster_schema.quick_json import encoded


def rule(reason: str, fix: str, *, at: str = "") -> PydanticCustomError:
    """An error to raise in a validator.  at: path below the model that raises it, as in `replicas`
    or `pools[1].name`.
    """
    return PydanticCustomError("rule", "{reason}", {"reason": reason, "fix": fix, "at": at})


def spelled(pattern: str, what: str, fix: str) -> AfterValidator:
    """A validator of text that must match the whole pattern.  what: completes `'...'
    is not ...`.
    """
    compiled = re.compile(pattern, re.ASCII)

    def check(value: str) -> str:
        if compiled.fullmatch(value) is None:
            raise rule(f"{value!r} is not {what}", fix)
        return value

    return AfterValidator(check)


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
