"""The W3C trace context of the running task, as the text of the header `traceparent`."""

import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

HEADER = "traceparent"
STATE_HEADER = "tracestate"

_FORM = re.compile(
    "(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,200})?"
)
# gRPC carries no other characters, and fails a call that has them
_STATE_FORM = re.compile("[ -~]*")
_MAX_STATE = 512  # characters, as many as the recommendation asks every participant to keep

_context: ContextVar[tuple[str, str]] = ContextVar("trace context", default=("", ""))


def enter(parent: str, state: str = "") -> None:
    """Take a context for the running task; an invalid parent is ignored, with its state."""
    valid = bool(_FORM.fullmatch(parent)) and (not parent.startswith("00") or len(parent) == 55)
    _context.set((parent, _kept(state)) if valid else ("", ""))


def _kept(state: str) -> str:
    """The first members of a state that fit; none of one that has other characters."""
    if not _STATE_FORM.fullmatch(state):
        return ""
    return state if len(state) <= _MAX_STATE else state[: _MAX_STATE + 1].rpartition(",")[0]


def current() -> dict[str, str]:
    """Headers of the context; empty without one."""
    parent, state = _context.get()
    if not parent:
        return {}
    return {HEADER: parent, STATE_HEADER: state} if state else {HEADER: parent}


def metadata() -> tuple[tuple[str, str], ...] | None:
    return tuple(current().items()) or None


def receive(sent: Iterable[tuple[str, Any]] | None) -> None:
    """Enter the context in the metadata of a call, or none."""
    found = {
        key: value
        for key, value in sent or ()
        if key in (HEADER, STATE_HEADER) and isinstance(value, str)
    }
    enter(found.get(HEADER, ""), found.get(STATE_HEADER, ""))
