"""Constraints that wait to be compiled, in a thread of their own, one API key after another."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future
from contextlib import contextmanager

from pdcluster_worker.messages.requests import Constraint
from pdcluster_worker.structured_output.compiler import CompiledForm

NICENESS = 10
"""Niceness of the thread that compiles: the engine's steps need the cores more."""

STACK_BYTES = 256 << 20
"""Address space for the compiler's stack: it recurses once for each reference in a row."""

Entry = Future[CompiledForm]


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads that are started meanwhile have a stack on which any form can be compiled."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


class CompileQueue:
    """Compiles in a thread of its own, one tenant after another; tenants are API keys by name."""

    def __init__(self, compile_one: Callable[[Constraint], CompiledForm]) -> None:
        self._compile_one = compile_one
        self._tenants: dict[str, deque[tuple[Constraint, Entry]]] = {}
        self._held: Set[str] = frozenset()
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, tenant: str, constraint: Constraint, entry: Entry) -> None:
        """Compile the constraint in its tenant's turn, unless the entry is cancelled before."""
        with self._changed:
            self._tenants.setdefault(tenant, deque()).append((constraint, entry))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar", daemon=True)
            with deep_stacks():
                self._thread.start()

    def hold(self, tenants: Set[str]) -> None:
        """Compile nothing for these, until they are held no more."""
        if tenants != self._held:
            with self._changed:
                self._held = tenants
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (taken := self._take()) is not None:
            constraint, entry = taken
            if not entry.done() and entry.set_running_or_notify_cancel():
                try:
                    entry.set_result(self._compile_one(constraint))
                except BaseException as e:
                    entry.set_exception(e)

    def _take(self) -> tuple[Constraint, Entry] | None:
        """The next of the tenant whose turn it is; None = closed."""
        with self._changed:
            while not self._is_closed:
                tenant = next((each for each in self._tenants if each not in self._held), None)
                if tenant is not None:
                    return self._pop(tenant)
                self._changed.wait()
            return None

    def _pop(self, tenant: str) -> tuple[Constraint, Entry]:
        pending = self._tenants.pop(tenant)
        taken = pending.popleft()
        if pending:  # behind all others
            self._tenants[tenant] = pending
        return taken
