"""Grammars are compiled once each by a process of their own, which may fail or hang
without harm.
"""

import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from pdcluster_worker.engine.request import Request
from pdcluster_worker.errors import ModelError
from pdcluster_worker.grammar import book as room
from pdcluster_worker.grammar import compiling
from pdcluster_worker.grammar.book import GrammarBook
from pdcluster_worker.grammar.child import CompileError, CompileProcess
from pdcluster_worker.grammar.forms import Form
from pdcluster_worker.grammar.vocabulary import read_vocabulary
from pdcluster_worker.grammar.wire import Opened, Wrong, encode, frame
from pdcluster_worker.messages.constraint import Constraint
from pdcluster_worker.messages.requests import Sampling

VOCAB_SIZE = 64
END = 1
WORDS = ["<s>", "</s>", "\u2581the", "fox", "<0x41>", "\u2581", "a", "b", "<tool>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of SentencePiece's kind; some ids of the model are beyond it."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(WORDS)}, merges=[], byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def book(folder: Path) -> Iterator[GrammarBook]:
    book = GrammarBook(VOCAB_SIZE)
    book.folder = folder
    yield book
    book.close()


def request_of(text: str, name: str = "a", kind: str = "regex", tenant: str = "") -> Request:
    return Request(
        name,
        [3],
        1,
        Sampling(max_tokens=9, seed=0, eos_token_ids=[END], constraint=Constraint(kind, text)),
        tenant=tenant,
    )


def settled(book: GrammarBook, request: Request) -> object:
    deadline = time.monotonic() + 60
    while (answer := book.open(request)) is False:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return answer


def test_every_token_has_its_bytes_and_control_tokens_have_none(folder):
    vocabulary = read_vocabulary(folder, VOCAB_SIZE)

    assert vocabulary[:10] == [b"", b"", b" the", b"fox", b"A", b" ", b"a", b"b", b"<tool>", b""]
    assert len(vocabulary) == VOCAB_SIZE


def test_a_folder_without_a_tokenizer_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer.json: cannot be read"):
        read_vocabulary(tmp_path, VOCAB_SIZE)


def test_a_constraint_is_compiled_once_and_counted(book):
    book.take_counts()
    told = []
    book.on_change = lambda: told.append(1)
    first, second = request_of("a+b", "first"), request_of("a+b", "second")
    for request in (first, second):
        book.begin(request)
    assert settled(book, first) is settled(book, second) is True
    assert told

    follower = book.follower(first)
    assert follower is not book.follower(second)
    assert follower.count_fitting([6, 6, 7, END]) == 4
    assert follower.count_fitting([2]) == 0
    counts = book.take_counts()
    assert (dict(counts.requests), counts.hits) == ({"regex": 2}, 1)
    assert [outcome for outcome, _ in counts.compiles] == ["compiled"]
    assert book.take_counts().compiles == []
    book.forget("first")
    with pytest.raises(KeyError):
        book.follower(first)


def test_a_constraint_that_cannot_be_compiled_is_remembered(book):
    book.take_counts()
    wrong = request_of("a(b", "wrong")
    book.begin(wrong)
    error = settled(book, wrong)
    again = settled(book, wrong)

    assert (error.status, error.param) == (400, "constraint")
    assert "position 4: The parenthesis is not closed" in error.message
    assert again.message == error.message
    assert [outcome for outcome, _ in book.take_counts().compiles] == ["failed"]


def test_what_was_longest_not_asked_for_is_forgotten_and_its_followers_go_on(book, monkeypatch):
    monkeypatch.setattr(room, "MOST_ENTRIES", 2)
    held = request_of("fox", "held")
    assert settled(book, held) is True
    for text in ("a", "b", "ab"):
        assert settled(book, request_of(text, text)) is True

    assert len(book._entries) <= 2
    assert book.follower(held).count_fitting([3]) == 1


def test_a_model_without_an_end_token_refuses_every_constraint(book):
    endless = Request(
        "endless", [3], 1, Sampling(max_tokens=9, seed=0, constraint=Constraint("regex", "a"))
    )

    assert "no token that ends an answer" in settled(book, endless).message


def test_end_tokens_that_the_model_has_not_end_nothing(book):
    both, neither = (
        Request(
            name,
            [3],
            1,
            Sampling(max_tokens=9, seed=0, eos_token_ids=ends, constraint=Constraint("regex", "a")),
        )
        for name, ends in (("both", [VOCAB_SIZE, END]), ("neither", [VOCAB_SIZE, -1]))
    )

    assert settled(book, both) is True
    assert book.follower(both).count_fitting([6, END]) == 2
    assert "no token that ends an answer" in settled(book, neither).message


def test_a_constraint_at_which_a_process_failed_is_tried_again_later(book, monkeypatch):
    compiled = CompileProcess.compile

    def fail(_, constraint):
        raise CompileError("gave up", time.monotonic())

    monkeypatch.setattr(CompileProcess, "compile", fail)
    assert settled(book, request_of("ab+", "first")).message == "gave up"
    monkeypatch.setattr(CompileProcess, "compile", compiled)

    assert settled(book, request_of("ab+", "at once")).message == "gave up"
    monkeypatch.setattr(room, "RETRY_SECONDS", 0.0)
    assert settled(book, request_of("ab+", "later")) is True


def test_what_no_request_waits_for_any_more_is_not_compiled(monkeypatch):
    gate, begun = threading.Event(), []

    def compiled(_, constraint):
        begun.append(constraint.text)
        assert gate.wait(60)
        raise CompileError("no")

    monkeypatch.setattr(GrammarBook, "_compile", compiled)
    monkeypatch.setattr(room, "NUM_PROCESSES", 1)
    book = GrammarBook(VOCAB_SIZE)
    try:
        names = {"first": "a", "left": "b", "one": "ab", "other": "ab"}
        for name, text in names.items():
            book.begin(request_of(text, name))
        for name in ("left", "one"):
            book.forget(name)
        gate.set()
        for name in ("first", "other"):
            settled(book, request_of(names[name], name))
    finally:
        gate.set()
        book.close()

    assert begun == ["a", "ab"]


def test_slow_constraints_of_one_key_hold_up_no_other_key(monkeypatch):
    gate, begun = threading.Event(), []

    def compiled(_, constraint):
        begun.append(constraint.text)
        assert constraint.text == "quick" or gate.wait(60)
        raise CompileError(constraint.text)

    monkeypatch.setattr(GrammarBook, "_compile", compiled)
    book = GrammarBook(VOCAB_SIZE)
    slow = [request_of(text, text, tenant="slow") for text in ("a", "b", "ab", "ba")]
    try:
        for request in slow:
            book.begin(request)
        error = settled(book, request_of("quick", "quick", tenant="other"))
        assert error.message == "quick"
        assert not {"ab", "ba"} & set(begun)
        gate.set()
        assert [settled(book, request).message for request in slow] == ["a", "b", "ab", "ba"]
    finally:
        gate.set()
        book.close()


def test_an_engine_that_knows_no_text_refuses_every_constraint():
    alone = GrammarBook(VOCAB_SIZE)
    error = settled(alone, request_of("a"))
    alone.close()

    assert "does not know its tokens' text" in error.message


def scripted(folder: Path, script: str, seconds: float) -> CompileProcess:
    """A compile process whose program is another."""
    process = CompileProcess(folder, VOCAB_SIZE, seconds)
    process._command = [
        sys.executable,
        "-S",
        "-c",
        f"import os, time\nos.write(1, {frame(Opened('{}'))!r})\n{script}",
    ]
    return process


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("time.sleep(60)", "takes more than 0.2 s to compile: make it simpler"),
        ("os.read(0, 9)", "the compiler gave up on it: make it simpler"),
        ("os.read(0, 9); os.write(1, b'1234567')", "the compiler gave up on it"),
        (f"os.read(0, 9); os.write(1, {frame(Wrong('no'))!r}); time.sleep(60)", "^no$"),
    ],
)
def test_a_compile_that_hangs_or_dies_is_an_error_of_its_constraint(folder, script, words):
    process = scripted(folder, script, seconds=0.2)
    try:
        for _ in range(2):  # started again
            with pytest.raises(CompileError, match=words):
                process.compile(Constraint("regex", "a"))
            if words == "^no$":
                break
    finally:
        process.close()


def test_a_process_that_does_not_begin_says_why(tmp_path):
    process = CompileProcess(tmp_path, VOCAB_SIZE, seconds=20)
    with pytest.raises(CompileError, match=r"tokenizer.json: cannot be read"):
        process.compile(Constraint("regex", "a"))


def test_a_grammar_that_is_too_large_once_compiled_is_an_error_of_its_constraint(monkeypatch):
    monkeypatch.setattr(compiling, "MOST_GRAMMAR_BYTES", 2 << 20)
    compiled = SimpleNamespace(memory_size_bytes=lambda: 3 << 20)
    forms = SimpleNamespace(compile=lambda _: Form("", compiled))

    answer = compiling._compiled(forms, encode(Constraint("regex", "a")))

    assert answer == Wrong("is 3 MB once compiled, at most 2 are kept: make it simpler")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")])
def test_a_compile_that_takes_too_much_memory_says_so(error):
    def fail(_):
        raise error

    answer = compiling._compiled(SimpleNamespace(compile=fail), encode(Constraint("regex", "a")))

    assert answer == Wrong("takes more than 96 MB to compile: make it simpler")


def test_a_process_may_not_grow_beyond_its_bound(folder):
    process = CompileProcess(folder, VOCAB_SIZE, seconds=60)
    try:
        process.compile(Constraint("regex", "a"))
        child = process._process
        assert child is not None
        limit, _ = resource.prlimit(child.pid, resource.RLIMIT_AS)
        pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[0])

        assert limit - pages * resource.getpagesize() <= compiling.MOST_WORK_BYTES
    finally:
        process.close()
