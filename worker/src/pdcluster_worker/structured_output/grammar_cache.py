"""All grammars of one engine: compiled once each, beside the engine, and held for the requests that
follow them.

`open` never waits: what is not compiled yet is begun, and `on_change` is called
when it is done.  A constraint that cannot be compiled is remembered too, so that
sending it again costs nothing; one at which a process failed is tried again later.
A compile without a waiting request is not begun, and each API key has its turn (`queue`).
Every method is called from the engine's thread.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pdcluster_worker.engine.ports import GrammarCounts
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.constraint import CONSTRAINT_PARAM, Constraint
from pdcluster_worker.structured_output.compile_process import CompileError, CompileProcess
from pdcluster_worker.structured_output.compile_queue import CompileQueue, Key
from pdcluster_worker.structured_output.matcher import Matcher
from pdcluster_worker.structured_output.native import compiler_over, library
from pdcluster_worker.structured_output.resident import Grammar, ResidentGrammars

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 20.0
"""Most seconds for one constraint; a schema of 500 properties takes about one."""

NUM_PROCESSES = 3
"""Two for one API key, so that one constraint that takes all its time does not hold up all others,
and one for the other keys; each is started when it is needed.
"""

RETRY_SECONDS = 30.0
"""Time for which a constraint is not tried again after a compile process died or took too long at
it.
"""

MOST_BYTES = 256 << 20
"""Most bytes of compiled grammars, about 3 MB each: of those that requests follow and those that
are kept for later ones.  Beyond it nothing is compiled until something is freed.
"""

NICENESS = 10
"""Niceness of the threads that compile: the engine's steps need the cores more."""

MOST_ENTRIES = 1024
"""Constraints that are remembered."""


class GrammarCache:
    """One per engine; on_change: called from another thread when a constraint is compiled, or
    cannot be.

    folder: of the model, whose tokenizer.json says what its tokens are; None = it has none, and no
            constraint can be compiled.
    """

    def __init__(self, vocab_size: int, seconds: float = COMPILE_SECONDS) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.folder: Path | None = None
        self._vocab_size = vocab_size
        self._seconds = seconds
        self._pool: ThreadPoolExecutor | None = None
        self._of_thread = threading.local()
        self._processes: list[CompileProcess] = []
        self._vocabulary: Any = None
        self._lock = threading.Lock()  # of the vocabulary
        self._queue = CompileQueue(NUM_PROCESSES)
        self._pending: dict[Key, Future[Grammar]] = {}  # of those in the line
        self._is_held_up = False  # for want of room
        self._queue_lock = threading.Lock()  # of these three
        self._entries: OrderedDict[Key, Future[Grammar]] = OrderedDict()
        self._waiting: dict[str, Key] = {}  # by request
        self._followers: dict[str, Matcher] = {}
        self._followed: dict[str, Grammar] = {}
        self._resident = ResidentGrammars()
        self._counts = GrammarCounts()
        self._compiles: list[tuple[str, float]] = []  # appended to by the threads

    def begin(self, request: EngineRequest) -> None:
        """See `engine.ports.Grammars`."""
        constraint = _constraint_of(request)
        self._counts.requests[constraint.kind] += 1
        self._counts.hits += _key(constraint) in self._entries
        self._waiting[request.request_id] = _key(constraint)
        self._entry(constraint, request.tenant)

    def open(self, request: EngineRequest) -> bool | RequestError:
        """See `engine.ports.Grammars`."""
        constraint = _constraint_of(request)
        if request.request_id in self._followers:
            return True
        ends = [
            token_id
            for token_id in request.sampling.eos_token_ids
            if 0 <= token_id < self._vocab_size
        ]
        if not ends:
            return RequestError(
                "cannot be served: this model has no token that ends an answer",
                param=CONSTRAINT_PARAM,
            )
        entry = self._entry(constraint, request.tenant)
        if not entry.done():
            return False
        self._waiting.pop(request.request_id, None)
        error = entry.exception()
        if error is not None:
            return RequestError(str(error), param=CONSTRAINT_PARAM)
        grammar = self._followed[request.request_id] = entry.result()
        matcher = library().GrammarMatcher(grammar.handle, ends, False, -1, None)
        self._followers[request.request_id] = Matcher(matcher)
        return True

    def follower(self, request: EngineRequest) -> Matcher:
        """Follower of a request that is open."""
        return self._followers[request.request_id]

    def forget(self, request_id: str) -> None:
        """Drop where a request stands, and a compile that only it waits for and that has not begun;
        unknown ids are a no-op.
        """
        self._followers.pop(request_id, None)
        self._followed.pop(request_id, None)
        key = self._waiting.pop(request_id, None)
        if (
            key is not None
            and key not in self._waiting.values()
            and (entry := self._entries.get(key)) is not None
            and entry.cancel()
        ):
            del self._entries[key]
            with self._queue_lock:
                self._queue.discard(key)
                self._pending.pop(key, None)
        self._evict()

    def take_counts(self) -> GrammarCounts:
        """Counts since the last call."""
        counts, self._counts = self._counts, GrammarCounts()
        counts.compiles, self._compiles = self._compiles, []
        return counts

    def close(self) -> None:
        """End the compile processes."""
        for process in self._processes:
            process.kill()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def _entry(self, constraint: Constraint, tenant: str) -> Future[Grammar]:
        key = _key(constraint)
        entry = self._entries.get(key)
        if entry is None or _may_be_tried_again(entry):
            entry = self._entries[key] = Future()
            entry.add_done_callback(lambda _: self.on_change())
            self._enqueue(tenant, key, entry)
        elif key in self._pending:
            self._enqueue(tenant, key, entry)  # at this tenant's turn, if that comes first
        self._entries.move_to_end(key)
        self._evict()
        return entry

    def _enqueue(self, tenant: str, key: Key, entry: Future[Grammar]) -> None:
        with self._queue_lock:
            if not self._queue.add(tenant, key):
                return
            self._pending[key] = entry
        self._begin_next()

    def _begin_next(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_PROCESSES, "grammar", _lower_priority)
        self._pool.submit(self._compile_in_turn)

    def _compile_in_turn(self) -> None:
        """In a thread of the pool: compile until no constraint may be begun."""
        while self._compile_next():
            pass

    def _compile_next(self) -> bool:
        turn = self._take()
        if turn is None:
            return False
        tenant, key, entry = turn
        started = time.monotonic()
        try:
            if entry.set_running_or_notify_cancel():
                entry.set_result(self._compile(Constraint(*key)))
        except BaseException as e:
            entry.set_exception(e)
        finally:
            with self._queue_lock:
                self._queue.done(tenant, time.monotonic() - started)
        return True

    def _take(self) -> tuple[str, Key, Future[Grammar]] | None:
        with self._queue_lock:
            self._is_held_up = bool(self._pending) and self._is_full()
            turn = None if self._is_held_up else self._queue.take()
            return None if turn is None else (*turn, self._pending.pop(turn[1]))

    def _is_full(self) -> bool:
        return self._resident.num_bytes >= MOST_BYTES

    def _evict(self) -> None:
        """Forget what was longest not used, but for what a request waits for; where bytes are
        short, what a request follows stays too, as it takes them all the same.

        Goes on compiling once there is room.
        """
        needed, kept = set(self._waiting.values()), {None, *map(id, self._followed.values())}
        for key in list(self._entries):
            is_long = len(self._entries) > MOST_ENTRIES
            if not is_long and not self._is_full():
                break
            is_idle = key not in needed and self._entries[key].done()
            if is_idle and (is_long or _result_id(self._entries[key]) not in kept):
                del self._entries[key]
        with self._queue_lock:
            may_go_on = self._is_held_up and not self._is_full()
            self._is_held_up &= not may_go_on
        if may_go_on:
            self._begin_next()

    def _compile(self, constraint: Constraint) -> Grammar:
        """In a thread of the pool, which has a process of its own."""
        started = time.monotonic()
        outcome = "failed"
        try:
            text = self._process().compile(constraint).grammar
            self._resident.give_back()
            handle = compiler_over(self._read_vocabulary()).compile_grammar_ebnf(
                library().Grammar.deserialize_json(text)
            )
            outcome = "compiled"
            return self._resident.add(Grammar(handle, int(handle.memory_size_bytes())))
        except CompileError as e:
            logger.info(
                "constraint refused kind=%s characters=%d reason=%s",
                constraint.kind,
                len(constraint.text),
                e,
            )
            raise
        finally:
            self._compiles.append((outcome, time.monotonic() - started))

    def _process(self) -> CompileProcess:
        process: CompileProcess | None = getattr(self._of_thread, "process", None)
        if process is None:
            if self.folder is None:
                raise CompileError("cannot be compiled: this engine does not know its tokens' text")
            process = self._of_thread.process = CompileProcess(
                self.folder, self._vocab_size, self._seconds
            )
            self._processes.append(process)
        return process

    def _read_vocabulary(self) -> Any:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = library().TokenizerInfo.deserialize_json(
                    self._process().vocabulary
                )
            return self._vocabulary


def _constraint_of(request: EngineRequest) -> Constraint:
    constraint = request.sampling.constraint
    assert constraint is not None, "a request without a constraint needs no grammar"
    return constraint


def _key(constraint: Constraint) -> Key:
    return constraint.kind, constraint.text, constraint.strict


def _may_be_tried_again(entry: Future[Grammar]) -> bool:
    error = entry.exception() if entry.done() else None
    failed = error.failed_seconds if isinstance(error, CompileError) else None
    return failed is not None and time.monotonic() - failed > RETRY_SECONDS


def _result_id(entry: Future[Grammar]) -> int | None:
    return id(entry.result()) if entry.done() and entry.exception() is None else None


def _lower_priority() -> None:
    """Lower that of this thread; those that xgrammar starts from it have the same."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
