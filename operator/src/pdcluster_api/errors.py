"""Every error that this package raises on purpose.

OperatorError
├── InvalidTraceError     a trace of load or a file of prompts is refused; carries every
│                         fault: line, reason and fix
├── EtcdUnreachableError  no etcd endpoint answers
│   └── EtcdFullError     it answers, and has no room for what was asked
├── IncompleteAnswerError a server that is measured answered with an error, or ended early
└── StartError            a cluster cannot start or go on here; carries the exit code (2 = the
                          user's input, 1 = the rest)
"""

from collections.abc import Sequence

from pdcluster_schema.faults import Fault


class OperatorError(Exception):
    """Root of the tree."""


class InvalidTraceError(OperatorError):
    """`faults` names everything that is wrong, with paths like `line 3, column seconds`."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = tuple(faults)


class EtcdUnreachableError(OperatorError):
    """No endpoint answered in time; the message names them all.

    reason: how each failed, for the log of the process that asked, and for no user of it
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class EtcdFullError(EtcdUnreachableError):
    """It takes no writes until its alarm is ended."""


class IncompleteAnswerError(OperatorError):
    pass


class StartError(OperatorError):
    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
