"""A broken rule, in the form that `schema.load` turns into a Fault."""

import re

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from pdcluster_api.quick_json import encoded


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
    """Refuse a part of an object that has more bytes than `most` as JSON.

    What JSON cannot say passes: it is refused where it stands.
    """
    try:
        num_bytes = len(encoded(value))
    except ValueError:
        return
    if num_bytes > most:
        raise rule(f"has {num_bytes} bytes as JSON, and may have {most} at most", fix)
