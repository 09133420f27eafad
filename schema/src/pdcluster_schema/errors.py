"""A fault of an object, and the error that carries faults."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in an object.

    path:   where, as in `spec.roles.decode.pools[0].replicas`; empty for the document as a whole
    reason: what is wrong, with the value that was found
    fix:    what to write instead
    """

    path: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.reason}; {self.fix}" if self.path else f"{self.reason}; {self.fix}"
        )


class InvalidObjectError(Exception):
    """A PDCluster object that is refused; `faults` names everything that is wrong, one line each in
    the message.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)
