"""`python -m pdcluster_worker.structured_output.compile_worker FOLDER VOCAB_SIZE`: the process
that compiles grammars for an engine.

It reads constraints from stdin and answers on stdout (`structured_output.compile_ipc`).  It is a
process of its own, with little memory and a low priority, so that no text that a
client sends can hold up, bloat or end the engine, which compiles itself what has
compiled here: a compiled grammar as text takes more time and memory than a second compile.
"""

import os
import resource
import sys
from pathlib import Path
from typing import cast

from pdcluster_worker.errors import ModelError
from pdcluster_worker.structured_output.compile_ipc import (
    CompileAnswer,
    Compiled,
    CompilerReady,
    Wrong,
    decode_constraint,
    frame,
    read_frame,
)
from pdcluster_worker.structured_output.compiler import ConstraintCompiler, FormError
from pdcluster_worker.structured_output.native import complaint, library
from pdcluster_worker.structured_output.vocabulary import read_vocabulary
from pdcluster_worker.system.freed_memory import trim_memory
from pdcluster_worker.system.parent_death import die_with_parent

MOST_WORK_BYTES = 96 << 20
"""Memory for one compile, over what the process has once it is open; one that needs more fails."""

MOST_GRAMMAR_BYTES = 32 << 20
"""Largest compiled grammar; one of 200 tools has 3 MB, one of 500 properties as much."""

NICENESS = 10
"""Compiling takes a core for seconds, and the engine's steps need it more."""


def main(folder: Path, vocab_size: int) -> int:
    """Answer constraints until stdin ends."""
    die_with_parent()
    os.nice(NICENESS)
    cast(dict[str, object], sys.modules)["torch"] = None  # tvm_ffi imports it where it finds it
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    try:
        forms, opened = _open(folder, vocab_size)
    except ModelError as e:
        forms, opened = None, Wrong(str(e))
    most = _address_space() + MOST_WORK_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    answers.write(frame(opened))
    answers.flush()
    while forms is not None and (content := read_frame(sys.stdin.buffer)) is not None:
        answers.write(frame(_compiled(forms, content)))
        answers.flush()
        trim_memory()
    return 0


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _open(folder: Path, vocab_size: int) -> tuple[ConstraintCompiler | None, CompileAnswer]:
    native = library()
    # No token ends an answer by itself: a matcher gets the ends of its own.
    vocabulary = native.TokenizerInfo(read_vocabulary(folder, vocab_size), 0, vocab_size, [], False)
    return ConstraintCompiler(native, vocabulary, vocab_size), CompilerReady(
        str(vocabulary.serialize_json())
    )


def _compiled(forms: ConstraintCompiler, content: bytes) -> CompileAnswer:
    try:
        form = forms.compile(decode_constraint(content))
    except FormError as e:
        return Wrong(str(e))
    except (RuntimeError, ValueError, MemoryError, RecursionError) as e:
        if isinstance(e, MemoryError) or "bad_alloc" in str(e):
            return Wrong(f"takes more than {MOST_WORK_BYTES >> 20} MB to compile: make it simpler")
        return Wrong(complaint(e) or type(e).__name__)
    num_bytes = int(form.compiled.memory_size_bytes())
    if num_bytes > MOST_GRAMMAR_BYTES:
        return Wrong(
            f"is {num_bytes >> 20} MB once compiled, at most {MOST_GRAMMAR_BYTES >> 20} are kept: "
            "make it simpler"
        )
    return Compiled(str(form.grammar.serialize_json()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
