"""All grammars of one engine: compiled once each, in a thread, and held for later requests.

A compile takes milliseconds, or for an adversarial form up to a second, for which no step waits.
"""

import json
import logging
import os
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import tokenizers

from pdcluster_worker.engine.ports import GrammarCounts
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.errors import ModelError, RequestError
from pdcluster_worker.messages.requests import CONSTRAINT_PARAM, Constraint
from pdcluster_worker.structured_output.compiler import CompiledForm, ConstraintCompiler
from pdcluster_worker.structured_output.lark import FormError
from pdcluster_worker.structured_output.matcher import Matcher
from pdcluster_worker.token_bytes import reader_for

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


NO_TEXT = b""
"""Text of control tokens, and of ids beyond the tokenizer's: never part of an answer."""


def read_vocabulary(folder: Path, vocab_size: int) -> list[bytes]:
    """One entry for each id of the model.  Raises ModelError."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise ModelError(f"{path}: cannot be read: {e}") from e
    read = reader_for(json.loads(tokenizer.to_str())["decoder"])
    control = {
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    tokens = ((token_id, tokenizer.id_to_token(token_id)) for token_id in range(vocab_size))
    return [
        NO_TEXT if token is None or token_id in control else read(token)
        for token_id, token in tokens
    ]


logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""Most bytes of compiled grammars, as estimated: of those that requests follow and those that are
kept for later ones.  Beyond it nothing is compiled for a tenant that holds more than its share.
States that requests add are not in it: up to MAX_LEXER_STATES of 0.4 to 2.5 kB for each form.
"""

SHARES = 4
"""Tenants that hold up to this part of MAX_BYTES have one form more compiled even beyond it."""

MAX_ENTRIES = 1024
"""Constraints that are remembered."""


class GrammarCache:
    """One per engine, whose thread makes all calls."""

    def __init__(self, vocab_size: int) -> None:
        # Called from another thread when a constraint is compiled, or cannot be.
        self.on_change: Callable[[], None] = lambda: None
        # With tokenizer.json; None = the model has none, and no constraint can be compiled.
        self.folder: Path | None = None
        self._vocab_size = vocab_size
        self._compiler: ConstraintCompiler | None = None
        self._queue = CompileQueue(self._compile)
        self._entries: OrderedDict[Constraint, Entry] = OrderedDict()
        self._waiting: dict[str, Constraint] = {}  # by request
        self._matchers: dict[str, Matcher] = {}
        self._tenants: dict[str, str] = {}  # of the requests that wait or have a matcher
        self._counts = GrammarCounts()
        self._compiles: list[tuple[str, float]] = []  # appended to by the thread

    def begin(self, request: EngineRequest) -> None:
        constraint = _constraint_of(request)
        self._counts.requests[constraint.kind] += 1
        self._waiting[request.request_id] = constraint
        self._tenants[request.request_id] = request.tenant
        entry = self._entries.get(constraint)
        self._counts.hits += entry is not None
        if entry is not None and not entry.done():  # this tenant's turn may come first
            self._queue.add(request.tenant, constraint, entry)
        self._entry(constraint, request.tenant)

    def open(self, request: EngineRequest) -> bool | RequestError:
        if request.request_id in self._matchers:
            return True
        ends = [each for each in request.sampling.eos_token_ids if 0 <= each < self._vocab_size]
        if not ends:
            return RequestError(
                "cannot be served: this model has no token that ends an answer",
                param=CONSTRAINT_PARAM,
            )
        entry = self._entry(_constraint_of(request), request.tenant)
        if not entry.done():
            return False
        self._waiting.pop(request.request_id, None)
        error = entry.exception()
        if error is not None:
            self._tenants.pop(request.request_id, None)
            return RequestError(str(error), param=CONSTRAINT_PARAM)
        self._tenants[request.request_id] = request.tenant
        self._matchers[request.request_id] = Matcher(entry.result(), ends)
        return True

    def matcher(self, request: EngineRequest) -> Matcher:
        return self._matchers[request.request_id]

    def forget(self, request_id: str) -> None:
        """Drop where a request stands, and a compile that only it waits for, if not begun."""
        self._matchers.pop(request_id, None)
        self._tenants.pop(request_id, None)
        constraint = self._waiting.pop(request_id, None)
        if constraint is not None and constraint not in self._waiting.values():
            entry = self._entries.get(constraint)
            if entry is not None and entry.cancel():
                del self._entries[constraint]
        self._evict()

    def take_counts(self) -> GrammarCounts:
        counts, self._counts = self._counts, GrammarCounts()
        counts.compiles, self._compiles = self._compiles, []
        return counts

    def close(self) -> None:
        self._queue.close()

    def _entry(self, constraint: Constraint, tenant: str) -> Entry:
        entry = self._entries.get(constraint)
        form = None if entry is None else _form_of(entry)
        is_new = entry is None or (form is not None and form.is_spent.is_set())
        if entry is None or is_new:
            entry = self._entries[constraint] = Entry()
            entry.add_done_callback(lambda _: self.on_change())
        self._entries.move_to_end(constraint)
        self._evict()  # which may hold this tenant
        if is_new:
            self._queue.add(tenant, constraint, entry)
        return entry

    def _evict(self) -> None:
        """Forget what was longest not used, but for what a request waits for or follows."""
        needed = set(self._waiting.values())
        held = self._held_forms()
        followed = {id(form) for forms in held.values() for form in forms}
        forms = {constraint: _form_of(entry) for constraint, entry in self._entries.items()}
        num_bytes = _num_bytes(chain(forms.values(), *held.values()))
        for constraint, form in forms.items():
            if num_bytes <= MAX_BYTES and len(self._entries) <= MAX_ENTRIES:
                break
            if (
                constraint not in needed
                and self._entries[constraint].done()
                and id(form) not in followed
            ):
                del self._entries[constraint]
                num_bytes -= form.num_bytes if form else 0
        share = MAX_BYTES // SHARES if num_bytes > MAX_BYTES else num_bytes
        self._queue.hold({name for name, each in held.items() if _num_bytes(each) > share})

    def _held_forms(self) -> dict[str, list[CompiledForm]]:
        """By tenant, the forms that its requests follow or are about to."""
        forms = {name: matcher.form for name, matcher in self._matchers.items()}
        for request_id, constraint in self._waiting.items():
            form = _form_of(self._entries[constraint]) if constraint in self._entries else None
            if form is not None:
                forms[request_id] = form
        held: defaultdict[str, list[CompiledForm]] = defaultdict(list)
        for request_id, form in forms.items():
            held[self._tenants.get(request_id, "")].append(form)
        return held

    def _compile(self, constraint: Constraint) -> CompiledForm:
        """In the queue's thread.  Raises FormError."""
        started = time.monotonic()
        outcome = "failed"
        try:
            form = self._opened().compile(constraint)
            outcome = "compiled"
            return form
        except (FormError, ModelError) as e:
            logger.info(
                "constraint refused kind=%s characters=%d reason=%s",
                constraint.kind,
                len(constraint.text),
                e,
            )
            raise
        finally:
            self._compiles.append((outcome, time.monotonic() - started))

    def _opened(self) -> ConstraintCompiler:
        if self._compiler is None:
            if self.folder is None:
                raise FormError("cannot be compiled: this engine does not know its tokens' text")
            self._compiler = ConstraintCompiler(read_vocabulary(self.folder, self._vocab_size))
        return self._compiler


def _constraint_of(request: EngineRequest) -> Constraint:
    constraint = request.sampling.constraint
    assert constraint is not None, "a request without a constraint needs no grammar"
    return constraint


def _num_bytes(forms: Iterable[CompiledForm | None]) -> int:
    return sum({id(form): form.num_bytes for form in forms if form}.values())


def _form_of(entry: Entry) -> CompiledForm | None:
    is_compiled = entry.done() and not entry.cancelled() and entry.exception() is None
    return entry.result() if is_compiled else None
