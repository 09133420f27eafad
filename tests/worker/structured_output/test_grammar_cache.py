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

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.constraint import Constraint
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.structured_output import compile_worker
from pdcluster_worker.structured_output import grammar_cache as room
from pdcluster_worker.structured_output.compile_ipc import CompilerReady, Wrong, encode, frame
from pdcluster_worker.structured_output.compile_process import CompileError, CompileProcess
from pdcluster_worker.structured_output.compiler import CompiledForm
from pdcluster_worker.structured_output.grammar_cache import GrammarCache
from pdcluster_worker.structured_output.vocabulary import read_vocabulary

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
def cache(folder: Path) -> Iterator[GrammarCache]:
    cache = GrammarCache(VOCAB_SIZE)
    cache.folder = folder
    yield cache
    cache.close()


def request_of(text: str, name: str = "a", kind: str = "regex", tenant: str = "") -> EngineRequest:
    return EngineRequest(
        name,
        [3],
        1,
        SamplingParams(
            max_tokens=9, seed=0, eos_token_ids=[END], constraint=Constraint(kind, text)
        ),
        tenant=tenant,
    )


def settled(cache: GrammarCache, request: EngineRequest) -> object:
    deadline = time.monotonic() + 60
    while (answer := cache.open(request)) is False:
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


def test_a_constraint_is_compiled_once_and_counted(cache):
    cache.take_counts()
    told = []
    cache.on_change = lambda: told.append(1)
    first, second = request_of("a+b", "first"), request_of("a+b", "second")
    for request in (first, second):
        cache.begin(request)
    assert settled(cache, first) is settled(cache, second) is True
    assert told

    follower = cache.follower(first)
    assert follower is not cache.follower(second)
    assert follower.count_fitting([6, 6, 7, END]) == 4
    assert follower.count_fitting([2]) == 0
    counts = cache.take_counts()
    assert (dict(counts.requests), counts.hits) == ({"regex": 2}, 1)
    assert [outcome for outcome, _ in counts.compiles] == ["compiled"]
    assert cache.take_counts().compiles == []
    cache.forget("first")
    with pytest.raises(KeyError):
        cache.follower(first)


def test_a_constraint_that_cannot_be_compiled_is_remembered(cache):
    cache.take_counts()
    wrong = request_of("a(b", "wrong")
    cache.begin(wrong)
    error = settled(cache, wrong)
    again = settled(cache, wrong)

    assert (error.status, error.param) == (400, "constraint")
    assert "position 4: The parenthesis is not closed" in error.message
    assert again.message == error.message
    assert [outcome for outcome, _ in cache.take_counts().compiles] == ["failed"]


def test_what_was_longest_not_asked_for_is_forgotten_and_its_followers_go_on(cache, monkeypatch):
    monkeypatch.setattr(room, "MOST_ENTRIES", 2)
    held = request_of("fox", "held")
    assert settled(cache, held) is True
    for text in ("a", "b", "ab"):
        assert settled(cache, request_of(text, text)) is True

    assert len(cache._entries) <= 2
    assert cache.follower(held).count_fitting([3]) == 1


def test_a_model_without_an_end_token_refuses_every_constraint(cache):
    endless = EngineRequest(
        "endless", [3], 1, SamplingParams(max_tokens=9, seed=0, constraint=Constraint("regex", "a"))
    )

    assert "no token that ends an answer" in settled(cache, endless).message


def test_end_tokens_that_the_model_has_not_end_nothing(cache):
    both, neither = (
        EngineRequest(
            name,
            [3],
            1,
            SamplingParams(
                max_tokens=9, seed=0, eos_token_ids=ends, constraint=Constraint("regex", "a")
            ),
        )
        for name, ends in (("both", [VOCAB_SIZE, END]), ("neither", [VOCAB_SIZE, -1]))
    )

    assert settled(cache, both) is True
    assert cache.follower(both).count_fitting([6, END]) == 2
    assert "no token that ends an answer" in settled(cache, neither).message


def test_a_constraint_at_which_a_process_failed_is_tried_again_later(cache, monkeypatch):
    compiled = CompileProcess.compile

    def fail(_, constraint):
        raise CompileError("gave up", time.monotonic())

    monkeypatch.setattr(CompileProcess, "compile", fail)
    assert settled(cache, request_of("ab+", "first")).message == "gave up"
    monkeypatch.setattr(CompileProcess, "compile", compiled)

    assert settled(cache, request_of("ab+", "at once")).message == "gave up"
    monkeypatch.setattr(room, "RETRY_SECONDS", 0.0)
    assert settled(cache, request_of("ab+", "later")) is True


def test_what_no_request_waits_for_any_more_is_not_compiled(monkeypatch):
    gate, begun = threading.Event(), []

    def compiled(_, constraint):
        begun.append(constraint.text)
        assert gate.wait(60)
        raise CompileError("no")

    monkeypatch.setattr(GrammarCache, "_compile", compiled)
    monkeypatch.setattr(room, "NUM_PROCESSES", 1)
    cache = GrammarCache(VOCAB_SIZE)
    try:
        names = {"first": "a", "left": "b", "one": "ab", "other": "ab"}
        for name, text in names.items():
            cache.begin(request_of(text, name))
        for name in ("left", "one"):
            cache.forget(name)
        gate.set()
        for name in ("first", "other"):
            settled(cache, request_of(names[name], name))
    finally:
        gate.set()
        cache.close()

    assert begun == ["a", "ab"]


def test_slow_constraints_of_one_key_hold_up_no_other_key(monkeypatch):
    gate, begun = threading.Event(), []

    def compiled(_, constraint):
        begun.append(constraint.text)
        assert constraint.text == "quick" or gate.wait(60)
        raise CompileError(constraint.text)

    monkeypatch.setattr(GrammarCache, "_compile", compiled)
    cache = GrammarCache(VOCAB_SIZE)
    slow = [request_of(text, text, tenant="slow") for text in ("a", "b", "ab", "ba")]
    try:
        for request in slow:
            cache.begin(request)
        error = settled(cache, request_of("quick", "quick", tenant="other"))
        assert error.message == "quick"
        assert not {"ab", "ba"} & set(begun)
        gate.set()
        assert [settled(cache, request).message for request in slow] == ["a", "b", "ab", "ba"]
    finally:
        gate.set()
        cache.close()


def test_an_engine_that_knows_no_text_refuses_every_constraint():
    alone = GrammarCache(VOCAB_SIZE)
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
        f"import os, time\nos.write(1, {frame(CompilerReady('{}'))!r})\n{script}",
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
    monkeypatch.setattr(compile_worker, "MOST_GRAMMAR_BYTES", 2 << 20)
    compiled = SimpleNamespace(memory_size_bytes=lambda: 3 << 20)
    forms = SimpleNamespace(compile=lambda _: CompiledForm("", compiled))

    answer = compile_worker._compiled(forms, encode(Constraint("regex", "a")))

    assert answer == Wrong("is 3 MB once compiled, at most 2 are kept: make it simpler")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")])
def test_a_compile_that_takes_too_much_memory_says_so(error):
    def fail(_):
        raise error

    answer = compile_worker._compiled(
        SimpleNamespace(compile=fail), encode(Constraint("regex", "a"))
    )

    assert answer == Wrong("takes more than 96 MB to compile: make it simpler")


def test_a_process_may_not_grow_beyond_its_bound(folder):
    process = CompileProcess(folder, VOCAB_SIZE, seconds=60)
    try:
        process.compile(Constraint("regex", "a"))
        child = process._process
        assert child is not None
        limit, _ = resource.prlimit(child.pid, resource.RLIMIT_AS)
        pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[0])

        assert limit - pages * resource.getpagesize() <= compile_worker.MOST_WORK_BYTES
    finally:
        process.close()
