"""A broken rule, in the form that `api.load` turns into a Fault."""

from pydantic_core import PydanticCustomError


def rule(reason: str, fix: str, *, at: str = "") -> PydanticCustomError:
    """An error to raise in a validator.  at: path below the model that raises it, as in `replicas` or `pools[1].name`."""
    return PydanticCustomError("rule", "{reason}", {"reason": reason, "fix": fix, "at": at})
