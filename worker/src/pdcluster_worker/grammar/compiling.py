"""`python -m pdcluster_worker.grammar.compiling FOLDER VOCAB_SIZE`: the process that compiles
grammars for an engine.

It reads constraints from stdin and answers on stdout (`grammar.wire`).  It is a
process of its own, with little memory and a low priority, so that no text that a
client sends can hold up, bloat or end the engine.
"""

import os
import resource
import sys
import time
from pathlib import Path
from typing import cast

from pdcluster_worker.errors import ModelError
from pdcluster_worker.grammar.forms import FormError, Forms
from pdcluster_worker.grammar.native import complaint, library
from pdcluster_worker.grammar.vocabulary import read_vocabulary
from pdcluster_worker.grammar.wire import (
    Answer,
    Compiled,
    Opened,
    Wrong,
    decode_constraint,
    frame,
    read_frame,
)
from pdcluster_worker.machine.early_end import die_with_parent

MEMORY_BYTES = 4 << 30
"""Address space of the process; a compile that needs more fails."""

NICENESS = 10
"""Compiling takes a core for seconds, and the engine's steps need it more."""


def main(folder: Path, vocab_size: int) -> int:
    """Answer constraints until stdin ends."""
    die_with_parent()
    os.nice(NICENESS)
    cast(dict[str, object], sys.modules)["torch"] = None  # tvm_ffi imports it where it finds it
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        forms, opened = _open(folder, vocab_size)
    except ModelError as e:
        forms, opened = None, Wrong(str(e))
    answers.write(frame(opened))
    answers.flush()
    while forms is not None and (content := read_frame(sys.stdin.buffer)) is not None:
        answers.write(frame(_compiled(forms, content)))
        answers.flush()
    return 0


def _open(folder: Path, vocab_size: int) -> tuple[Forms | None, Answer]:
    native = library()
    # No token ends an answer by itself: a matcher gets the ends of its own.
    vocabulary = native.TokenizerInfo(read_vocabulary(folder, vocab_size), 0, vocab_size, [], False)
    return Forms(native, vocabulary, vocab_size), Opened(str(vocabulary.serialize_json()))


def _compiled(forms: Forms, content: bytes) -> Answer:
    started = time.monotonic()
    try:
        compiled = forms.compile(decode_constraint(content))
    except FormError as e:
        return Wrong(str(e))
    except (RuntimeError, ValueError, MemoryError, RecursionError) as e:
        return Wrong(complaint(e) or type(e).__name__)
    return Compiled(str(compiled.serialize_json()), time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
