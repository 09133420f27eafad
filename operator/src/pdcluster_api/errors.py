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

import os
import socket
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


def no_answer(error: Exception) -> str:
    """The reason why a server did not answer, without the words of the HTTP client for itself.

    >>> no_answer(ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)"))
    'Connection refused'
    """
    cause = getattr(error, "os_error", error)  # of aiohttp's errors, which this module is free of
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    if isinstance(cause, socket.gaierror):
        return "no such host"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return str(cause) or type(cause).__name__
