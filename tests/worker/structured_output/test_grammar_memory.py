"""Memory of grammars is bounded by what is really resident: those that requests follow, those that
are kept for later ones, and the processes that compile.
"""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.structured_output import grammar_cache as room
from pdcluster_worker.structured_output.compile_process import CompileProcess
from pdcluster_worker.structured_output.grammar_cache import GrammarCache
from pdcluster_worker.structured_output.resident import Grammar
from tests.worker.structured_output.schemas import of_schema

LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789 "{}[]:,_.-\\\n'
NUM_WORDS = 30_000
END = 0
MOST_BYTES = 4 << 20
MOST_PROCESS_BYTES = 128 << 20
SLACK_BYTES = 24 << 20  # the compiler's work, what malloc keeps, and Python's own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tokenizer with so many words that a grammar over it has a hundred kilobytes."""
    folder = tmp_path_factory.mktemp("words")
    words = itertools.chain(
        LETTERS, *(map("".join, itertools.product(LETTERS, repeat=n)) for n in (2, 3))
    )
    vocab = {"</s>": END} | {
        word: index + 1 for index, word in enumerate(itertools.islice(words, NUM_WORDS - 1))
    }
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarCache]:
    monkeypatch.setattr(room, "MOST_BYTES", MOST_BYTES)
    cache = GrammarCache(NUM_WORDS)
    cache.folder = folder
    yield cache
    cache.close()


def request_of(index: int) -> EngineRequest:
    """With a schema like no other's."""
    names = [f"p{index}_{number}" for number in range(4)]
    enums = {name: {"enum": [f"{name}_{value}" for value in range(2)]} for name in names}
    schema = {"type": "object", "properties": enums | {"any": {}}, "required": names}
    sampling = SamplingParams(
        max_tokens=9, seed=0, eos_token_ids=[END], constraint=of_schema(schema)
    )
    return EngineRequest(f"request-{index}", [1], 1, sampling)


def resident_bytes(process: str | int = "self") -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def num_bytes(entry: Future[Grammar]) -> int:
    return entry.result().num_bytes if entry.done() else 0


def test_five_hundred_different_schemas_take_no_more_than_their_bound(cache):
    most, most_of_one = 0, 0
    waiting = [request_of(index) for index in range(20)]
    for request in waiting:
        cache.begin(request)
    deadline = time.monotonic() + 240
    num_done, before = 0, 0
    while num_done < 500:
        assert time.monotonic() < deadline
        answers = [(request, cache.open(request)) for request in waiting]
        assert {answer for _, answer in answers} <= {True, False}
        for request in [request for request, answer in answers if answer]:
            cache.forget(request.request_id)
            waiting.remove(request)
            waiting.append(request_of(num_done + 20))
            cache.begin(waiting[-1])
            num_done += 1
            most = max(most, cache._resident.num_bytes)
        if not before and num_done >= 10:
            before = resident_bytes()
        time.sleep(0.001)
    processes = [process._process for process in cache._processes if process._process is not None]

    assert most <= MOST_BYTES + room.NUM_PROCESSES * most_of_one
    assert resident_bytes() - before <= MOST_BYTES + SLACK_BYTES
    assert max(resident_bytes(process.pid) for process in processes) <= MOST_PROCESS_BYTES


@pytest.mark.parametrize("pattern", [r"^[\n]$", "^[^a]{3}$"])
def test_a_class_of_characters_fits_the_memory_of_the_process(folder, pattern):
    process = CompileProcess(folder, NUM_WORDS, seconds=60)
    try:
        assert process.compile(of_schema({"type": "string", "pattern": pattern})).grammar
    finally:
        process.close()


def test_a_constraint_waits_while_the_bytes_of_others_are_followed(cache, monkeypatch):
    monkeypatch.setattr(room, "MOST_BYTES", 1)
    waiting = [request_of(index) for index in range(8)]
    for request in waiting:
        cache.begin(request)
    followed: list[EngineRequest] = []
    deadline = time.monotonic() + 60
    while waiting:
        assert time.monotonic() < deadline
        followed += [request for request in waiting if cache.open(request) is True]
        waiting = [request for request in waiting if request not in followed]
        assert len(followed) < room.NUM_PROCESSES
        if cache._is_held_up and followed:
            cache.forget(followed.pop().request_id)
        time.sleep(0.001)

    for request in followed:
        cache.forget(request.request_id)
    assert cache._resident.num_bytes == 0
