"""A compile process, as the engine sees it: asked one constraint at a time, and ended when that
takes too long.

Used from one thread, which outlives it: the process ends with the thread that started it.
"""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from pdcluster_worker.messages.constraint import Constraint
from pdcluster_worker.structured_output.compile_ipc import (
    LENGTH_BYTES,
    CompileAnswer,
    Compiled,
    CompilerReady,
    Wrong,
    decode_answer,
    frame,
)

_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
"""One heap: each other one would reserve 64 MB of the address space that the process may have."""

START_SECONDS = 60.0
"""Time for the process to import its modules and read the vocabulary."""


class CompileError(Exception):
    """A constraint cannot be compiled: the message says why.

    failed_seconds: of `time.monotonic`, when the process failed at it, which another time it may
                    not; None = it never can be.
    """

    def __init__(self, message: str, failed_seconds: float | None = None) -> None:
        super().__init__(message)
        self.failed_seconds = failed_seconds


class CompileProcess:
    """Started with the first constraint, and again after it had to be ended.

    vocabulary: as xgrammar writes it; None until it has been started.
    """

    def __init__(self, folder: Path, vocab_size: int, seconds: float) -> None:
        """seconds: for one constraint."""
        self.vocabulary: str | None = None
        self._command = [
            sys.executable,
            "-m",
            __package__ + ".compile_worker",
            str(folder),
            str(vocab_size),
        ]
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, constraint: Constraint) -> Compiled:
        """The grammar, once it was compiled.  Raises CompileError."""
        if self._process is None:
            self._start()
        answer = self._request(frame(constraint), self._seconds)
        if isinstance(answer, Compiled):
            return answer
        raise CompileError(
            answer.message if isinstance(answer, Wrong) else f"{type(answer).__name__} is no answer"
        )

    def kill(self) -> None:
        """End what is under way, which fails; safe from any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT,
            )
        except OSError as e:
            raise CompileError(
                f"cannot be compiled now: the compiler does not start: {e.strerror}",
                time.monotonic(),
            ) from e
        answer = self._request(b"", START_SECONDS)
        if not isinstance(answer, CompilerReady):
            self.close()
            raise CompileError(
                answer.message
                if isinstance(answer, Wrong)
                else f"{type(answer).__name__} is no beginning"
            )
        self.vocabulary = answer.vocabulary

    def _request(self, question: bytes, seconds: float) -> CompileAnswer:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        try:
            process.stdin.write(question)
            process.stdin.flush()
            out = process.stdout.fileno()
            length = int.from_bytes(_read(out, LENGTH_BYTES, deadline), "little")
            answer: CompileAnswer = decode_answer(_read(out, length, deadline))
            return answer
        except TimeoutError as e:
            self.close()
            raise CompileError(
                f"takes more than {seconds:g} s to compile: make it simpler", time.monotonic()
            ) from e
        except (OSError, EOFError, msgspec.DecodeError) as e:
            self.close()
            raise CompileError(
                "cannot be compiled: the compiler gave up on it: make it simpler", time.monotonic()
            ) from e


def _read(file: int, count: int, deadline: float) -> bytes:
    """So many bytes.  Raises TimeoutError, EOFError."""
    parts: list[bytes] = []
    poller = select.poll()
    poller.register(file, select.POLLIN)
    while count:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise TimeoutError
        part = os.read(file, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
