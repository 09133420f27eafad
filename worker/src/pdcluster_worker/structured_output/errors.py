"""Errors of constraints that cannot be compiled or followed."""

Pointer = tuple[str | int, ...]


class FormError(ValueError):
    """A constraint that cannot be compiled; the message says where and why."""


class SchemaError(FormError):
    """A schema that cannot be enforced; the message begins with its place, a JSON pointer."""

    def __init__(self, place: Pointer, reason: str) -> None:
        super().__init__(f"{pointer(place)}: {reason}")


def pointer(place: Pointer) -> str:
    """A place as a JSON pointer.

    >>> pointer(("properties", "a/b", "anyOf", 0))
    '#/properties/a~1b/anyOf/0'
    """
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in place)
    return "/".join(("#", *parts))
